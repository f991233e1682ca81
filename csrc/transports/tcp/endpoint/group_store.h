// Group stores: the values that members of groups exchange at an endpoint before they are
// connected, a store for each uuid. Any thread.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "core/sha256.h"
#include "core/types.h"
#include "transports/store.h"

namespace pycomm::tcp {

/// Which group a member wants to form: all members must name the same.
struct GroupRequest {
  int64_t uuid = 0;
  int rank = 0;
  int size = 0;
  Digest list = {};  ///< hash of the handles, in their order
};

/// Which ranks have come, and which of them have lost their connection before they had formed the
/// group: the operating system closes it when a process ends, however it ends.
struct MemberStatus {
  std::set<int> present, lost;
};

class GroupStore final : public Store {
 public:
  /// Notes that a rank is here. One that names other handles than the first spoils the store.
  void join(const GroupRequest& request);
  /// Notes that a rank has formed the group.
  void formed(int rank);
  /// Notes that the connection of a rank has ended.
  void left(int rank);
  void set(const std::string& key, const std::string& value) override;
  bool appends() const override { return true; }
  void append(const std::string& key, const std::string& value) override;
  /// These throw WireMismatch if members have named different handles.
  std::optional<std::string> find(const std::string& key) override;
  MemberStatus member_status() const;

 private:
  void check() const;

  mutable std::mutex mutex_;
  std::map<std::string, std::string> values_;
  size_t bytes_ = 0;
  MemberStatus status_;
  std::set<int> formed_;
  std::optional<GroupRequest> first_;
  std::string problem_;
};

class GroupStores {
 public:
  /// Returns the store of a uuid, a new one if there is none. A store lives as long as somebody
  /// uses it, and some time longer: a member that gave up has left its reason there.
  std::shared_ptr<GroupStore> store(int64_t uuid);

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<GroupStore>> stores_;
  std::map<int64_t, uint64_t> made_;  ///< when, counted in stores
  uint64_t count_ = 0;
};

}  // namespace pycomm::tcp
