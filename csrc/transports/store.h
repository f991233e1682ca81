// Store: a small key-value store in which ranks exchange values before they are connected.
// binding/torch/store.h adapts torch's c10d::Store to this interface.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/deadline.h"
#include "core/types.h"

namespace pycomm {

class PYCOMM_API Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits for the key and returns its value. Throws Timeout, which names the key.
  std::string get(const std::string& key, Deadline deadline);
  /// Returns the key's value if it is there now. A remote store does this in one round trip.
  virtual std::optional<std::string> find(const std::string& key) = 0;
  /// True if several ranks may append() to one key, so that one find() returns the values of all.
  virtual bool appends() const { return false; }
  /// Returns how long the fastest answer took so far; 0: not known, or the store is not remote.
  virtual std::chrono::microseconds round_trip() const { return std::chrono::microseconds(0); }
  /// Appends to the key's value, which is empty at first. Only if appends().
  virtual void append(const std::string& key, const std::string& value) { set(key, value); }
  /// Adds one to a counter and returns it; 0 if this store does not count.
  virtual int64_t count([[maybe_unused]] const std::string& key) { return 0; }
  /// Takes the value of a key out of the store. Only if count() counts.
  virtual void erase([[maybe_unused]] const std::string& key) {}
};

/// Makes a store in this process. `appends`: as remote stores do. It takes no more values once they
/// have more than `most_bytes`: then find() throws Error.
PYCOMM_API std::shared_ptr<Store> make_local_store(bool appends = false,
                                                   size_t most_bytes = SIZE_MAX);
/// Makes a store for processes that share a folder: one file per key, written by rename.
PYCOMM_API std::shared_ptr<Store> make_file_store(const std::string& folder);

}  // namespace pycomm
