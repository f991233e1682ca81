// Stores of values, by uuid.
#include "transports/tcp/endpoint/group_store.h"

#include "core/error.h"

namespace pycomm::tcp {
namespace {

// A store that nobody uses any more is kept while it is among the last few.
constexpr uint64_t kKept = 8;
// What members publish is some hundred bytes for each rank and topic.
constexpr size_t kLargestStore = size_t{64} << 20;

}  // namespace

void GroupStore::join(const GroupRequest& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (request.rank < 0 || request.rank >= request.size) {
    throw Error("endpoint: rank " + std::to_string(request.rank) + " of " +
                std::to_string(request.size) + " ranks joins");
  }
  if (!first_) first_ = request;
  if (!equal_digests(first_->list, request.list) && problem_.empty()) {
    problem_ = "rank " + std::to_string(request.rank) + " of " + std::to_string(request.size) +
               " and rank " + std::to_string(first_->rank) + " of " + std::to_string(first_->size) +
               " name different handles, or another order, for the group with uuid " +
               std::to_string(request.uuid) + "; pass the same list on all ranks";
  }
  if (request.size != first_->size) return;  // which other handles mean
  status_.present.insert(request.rank);
}

void GroupStore::formed(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  formed_.insert(rank);
}

void GroupStore::left(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (formed_.count(rank) == 0) status_.lost.insert(rank);
}

void GroupStore::check() const {
  if (!problem_.empty()) throw WireMismatch(problem_);
  if (bytes_ > kLargestStore) throw Error("endpoint: the members have published too much");
}

void GroupStore::set(const std::string& key, const std::string& value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string& kept = values_[key];
  bytes_ += key.size() + value.size() - (kept.empty() ? 0 : key.size() + kept.size());
  if (bytes_ <= kLargestStore) kept = value;
}

void GroupStore::append(const std::string& key, const std::string& value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bytes_ += key.size() + value.size();
  if (bytes_ <= kLargestStore) values_[key] += value;
}

std::optional<std::string> GroupStore::find(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check();
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

MemberStatus GroupStore::member_status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  check();
  return status_;
}

std::shared_ptr<GroupStore> GroupStores::store(int64_t uuid) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& store = stores_[uuid];
  if (store) return store;
  store = std::make_shared<GroupStore>();
  auto result = store;
  made_[uuid] = ++count_;
  for (auto it = stores_.begin(); it != stores_.end();) {
    const bool old = made_[it->first] + kKept < count_ && it->second.use_count() == 1;
    if (old) made_.erase(it->first);
    it = old ? stores_.erase(it) : std::next(it);
  }
  return result;
}

}  // namespace pycomm::tcp
