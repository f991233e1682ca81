// Where ranks meet before they can talk: a small key-value store. torch's c10d::Store is adapted to
// this in binding/c10d_store.h.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/types.h"

namespace pycomm {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits for the key. Throws Timeout, which names the key.
  virtual std::string get(const std::string& key, Deadline deadline) = 0;
  /// The key's value if it is there now.
  virtual std::optional<std::string> find(const std::string& key) = 0;
  /// Waits for all of the keys. A store that is far away does it in one round trip.
  virtual std::vector<std::string> get_many(const std::vector<std::string>& keys,
                                            Deadline deadline) {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(get(key, deadline));
    return values;
  }
};

/// For ranks that are threads of one process.
PYCOMM_API std::shared_ptr<Store> make_local_store();
/// For processes that share a folder: one file per key, written by rename.
PYCOMM_API std::shared_ptr<Store> make_file_store(const std::string& folder);

}  // namespace pycomm
