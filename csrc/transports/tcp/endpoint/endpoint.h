// Endpoint: where a process can be reached by those that want to form a group with it, before there
// is one. It outlives the groups. The first member of a new group lends the others its endpoint as
// their store; any endpoint answers whether its process takes part in a group.
//
// Callers prove the secret as on any connection of ranks (connect/handshake.h), before one of their
// bytes is parsed.
#pragma once
#include <atomic>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fork_guard.h"
#include "core/sha256.h"
#include "core/types.h"
#include "transports/store.h"
#include "transports/tcp/endpoint/handle.h"

namespace pycomm::tcp {

// Messages between a member and an endpoint: numbers and strings, little-endian, each message with
// its length before it.
//
//   Join      uuid, list                    no answer; what follows is of this group's store
//   Set       key, value                    no answer
//   Append    key, value                    no answer
//   Find      key                           Value (0 or 1, value)
//   Count     key                           Value (the number)
//   Erase     key                           no answer
//   Question  uuid                          Answer (state, list, text)
enum class MessageKind : uint8_t {
  join = 1,
  set,
  append,
  find,
  question,
  value,
  answer,
  count,
  erase
};

/// What an endpoint knows of a uuid: its process does not know it, forms the group now, has
/// formed it, or has failed to, for a reason.
enum class FormationState : uint8_t { unknown, forms, formed, failed };

constexpr size_t kLargestMessage = size_t{16} << 20;

class MessageWriter {
 public:
  explicit MessageWriter(MessageKind kind) : text_(sizeof(uint32_t), '\0') {
    text_ += static_cast<char>(kind);
  }
  template <typename T>
  MessageWriter& number(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  MessageWriter& string(const std::string& value) {
    number(static_cast<uint32_t>(value.size()));
    text_ += value;
    return *this;
  }
  /// Returns the message with its length.
  std::string finished() const {
    std::string text = text_;
    const auto size = static_cast<uint32_t>(text.size() - sizeof(uint32_t));
    std::memcpy(text.data(), &size, sizeof size);
    return text;
  }

 private:
  std::string text_;
};

/// Reads a message; throws Error where it ends too early.
class MessageReader {
 public:
  explicit MessageReader(std::string text) : text_(std::move(text)) {}
  MessageKind kind() { return static_cast<MessageKind>(number<uint8_t>()); }
  template <typename T>
  T number() {
    T value;
    take(&value, sizeof value);
    return value;
  }
  std::string string() {
    const auto size = number<uint32_t>();
    if (size > text_.size() - at_) throw Error("endpoint: a message is cut short");
    std::string value = text_.substr(at_, size);
    at_ += size;
    return value;
  }

 private:
  void take(void* to, size_t bytes) {
    if (bytes > text_.size() - at_) throw Error("endpoint: a message is cut short");
    std::memcpy(to, text_.data() + at_, bytes);
    at_ += bytes;
  }
  const std::string text_;
  size_t at_ = 0;
};

/// Takes the first message, without its length, from what has arrived. Returns false if it is not
/// there as a whole. Throws Error if it is too large.
inline bool take_message(std::string& arrived, std::string& message) {
  uint32_t size = 0;
  if (arrived.size() < sizeof size) return false;
  std::memcpy(&size, arrived.data(), sizeof size);
  if (size > kLargestMessage) throw Error("endpoint: a message of " + std::to_string(size) + " B");
  if (arrived.size() - sizeof size < size) return false;
  message = arrived.substr(sizeof size, size);
  arrived.erase(0, sizeof size + size);
  return true;
}

class PYCOMM_API Endpoint {
 public:
  /// Listens, on the interfaces and ports that the options name. Throws Error if it cannot.
  Endpoint(const std::string& group, const GroupOptions& options);
  /// Listens at an address and port of this host that others know beforehand: see find_store().
  Endpoint(const Address& at, const GroupOptions& options);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const Handle& handle() const { return handle_; }
  /// Claims a uuid, which later questions are answered by. Throws Error "... already used" if it
  /// was claimed before.
  void claim(int64_t uuid, const Digest& list);
  /// Ends the claim: the group is formed, or has failed for this reason.
  void release(const std::string& failure);
  /// Returns the store of the group with this uuid and this hash of its members' handles. It lives
  /// as long as somebody uses it, and some time longer: a member that gave up has left its reason
  /// there.
  std::shared_ptr<Store> lend(int64_t uuid, const Digest& list = {});

 private:
  struct Caller;

  void start();
  void run();
  void accept_all(const Fd& listener);
  void serve(Caller& caller);
  void read(Caller& caller);
  void write(Caller& caller);
  void obey(Caller& caller, const std::string& text);

  Handle handle_;
  std::string secret_;
  std::vector<Fd> listeners_;
  Fd wake_;
  std::mutex mutex_;
  std::map<std::pair<int64_t, Digest>, std::weak_ptr<Store>> stores_;
  std::deque<std::shared_ptr<Store>> last_stores_;
  struct Claim {
    FormationState state;
    Digest list;
    std::string failure;
  };
  std::map<int64_t, Claim> claims_;  ///< by uuid, all of the endpoint's life
  std::optional<int64_t> current_;
  std::list<Caller> callers_;
  Deadline::Clock::time_point accept_backoff_until_{};
  const ForkGuard fork_{};
  std::atomic<bool> stop_{false};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace pycomm::tcp
