// Seal: proves that a value in the store comes from a process that knows the group's secret.
//
// The key is derived from the secret once in a process, slowly (transports/openssl.h): who sees a
// proof must pay that for each secret that he tries. The same key authenticates connections
// (tcp/connect/handshake.h) and handles (tcp/endpoint/handle.h).
//
//   sealed:HMAC:value     HMAC-SHA256 in hexadecimal, of the group, the name, and the value
#pragma once
#include <memory>
#include <string>

#include "core/types.h"
#include "transports/store.h"

namespace pycomm {

/// Returns the key of a secret that was given to all ranks; "" if it is empty. Warns if it is
/// short.
PYCOMM_API std::string key_of_secret(const std::string& secret);

/// Returns bytes in hexadecimal.
std::string hexadecimal(Span<const uint8_t> bytes);
/// Fills `out` with random bytes from the kernel.
void fill_random(Span<uint8_t> out);
/// Returns a secret for a group that was given none: 32 random bytes, in hexadecimal.
std::string random_secret();

class PYCOMM_API Seal {
 public:
  Seal() = default;
  /// `key`: of key_of_secret(); empty: values travel as they are.
  Seal(std::string key, std::string group) : key_(std::move(key)), group_(std::move(group)) {}

  bool seals() const { return !key_.empty(); }
  /// `name` is what tells this value from others of the group.
  std::string close(const std::string& name, const std::string& value) const;
  /// Returns the value. Throws Error, which begins with `what`, if it was not sealed by the same
  /// key under this name.
  std::string open(const std::string& name, const std::string& text, const std::string& what) const;

 private:
  std::string proof(const std::string& name, const std::string& value) const;

  std::string key_, group_;
};

/// A store in which each value is sealed by its key. What is appended is not.
class PYCOMM_API SealedStore final : public Store {
 public:
  SealedStore(std::shared_ptr<Store> store, Seal seal)
      : store_(std::move(store)), seal_(std::move(seal)) {}
  void set(const std::string& key, const std::string& value) override;
  /// Throws Error if the value has no right proof.
  std::optional<std::string> find(const std::string& key) override;

 private:
  const std::shared_ptr<Store> store_;
  const Seal seal_;
};

}  // namespace pycomm
