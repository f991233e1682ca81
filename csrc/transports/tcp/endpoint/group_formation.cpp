// Formation of a group from handles, and the stores of its members.
#include "transports/tcp/endpoint/group_formation.h"

#include <algorithm>
#include <map>
#include <thread>

#include "core/error.h"
#include "core/notice.h"
#include "transports/seal.h"
#include "transports/tcp/endpoint/connection.h"

namespace pycomm::tcp {
namespace {

// Members that come together need no question.
constexpr Milliseconds kFirstCheck(250);
constexpr Milliseconds kCheckInterval(300);
// Time that a question may take: four round trips, and a process that is busy.
constexpr Milliseconds kQuestion(3000);
// A port that refuses this often in a row, with kCheckInterval between, belongs to a process that
// is gone.
constexpr int kRefusals = 2;
// An operation on the store after the group was formed, by the straggler monitor.
constexpr Milliseconds kLateRequest(10000);
// What a member still says when the group was not formed in time; rank 0 had all the time before.
constexpr Milliseconds kLastWords(250);
constexpr Milliseconds kRetry(20);

Digest hash_of(const std::vector<std::string>& handles) {
  std::string text;
  for (const std::string& handle : handles) text += handle + "\n";
  return sha256(text);
}

std::string silence(const Timeout& late) {
  return std::string("rank 0 does not answer, at whose endpoint the members meet: ") + late.what();
}

}  // namespace

/// The store of the other members. Any thread, after the group was formed.
///
/// Answers come in the order of the questions. So after one that did not come in time, none can be
/// told from another, and the store is not used again.
class RemoteStore final : public Store {
 public:
  RemoteStore(EndpointConnection connection, const GroupRequest& request, const Deadline& deadline)
      : connection_(std::move(connection)), deadline_(deadline) {
    round_trip_ = connection_.round_trip().count();
    tell(MessageWriter(MessageKind::join)
             .number(request.uuid)
             .number(static_cast<int32_t>(request.rank))
             .number(static_cast<int32_t>(request.size))
             .number(request.list));
  }
  void set(const std::string& key, const std::string& value) override {
    tell(MessageWriter(MessageKind::set).string(key).string(value));
  }
  std::optional<std::string> find(const std::string& key) override {
    MessageReader value = ask(MessageWriter(MessageKind::find).string(key), MessageKind::value);
    if (value.number<uint8_t>() == 0) return std::nullopt;
    return value.string();
  }
  bool appends() const override { return true; }
  void append(const std::string& key, const std::string& value) override {
    tell(MessageWriter(MessageKind::append).string(key).string(value));
  }
  std::chrono::microseconds round_trip() const override {
    return std::chrono::microseconds(round_trip_.load());
  }
  /// The group was formed: later requests have their own time.
  void formed() noexcept {
    formed_ = true;
    try {
      tell(MessageWriter(MessageKind::formed));
    } catch (const std::exception&) {  // whoever has lost us or rank 0 notices it in the group
    }
  }
  MemberStatus member_status() {
    MessageReader answer = ask(MessageWriter(MessageKind::present), MessageKind::ranks);
    MemberStatus status;
    for (auto* ranks : {&status.present, &status.lost}) {
      for (auto count = answer.number<uint32_t>(); count > 0; count--)
        ranks->insert(answer.number<int32_t>());
    }
    return status;
  }

 private:
  Deadline deadline() const {
    if (!deadline_.expired()) return deadline_;
    return Deadline::after(formed_ ? kLateRequest : kLastWords);
  }
  void tell(const MessageWriter& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    explain([&] { connection_.send(message.finished(), deadline()); });
  }
  MessageReader ask(const MessageWriter& message, MessageKind wanted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string text;
    const auto start = Deadline::Clock::now();
    explain([&] {
      const Deadline limit = deadline();
      connection_.send(message.finished(), limit);
      text = connection_.receive(limit);
    });
    const auto took =
        std::chrono::duration_cast<std::chrono::microseconds>(Deadline::Clock::now() - start);
    round_trip_ = std::min<int64_t>(round_trip_, took.count());
    MessageReader answer(text);
    const MessageKind kind = answer.kind();
    if (kind == MessageKind::problem) throw WireMismatch(answer.string());
    if (kind != wanted) throw Error("endpoint: rank 0 answers what was not asked");
    return answer;
  }
  template <typename F>
  void explain(const F& act) {
    try {
      if (!silent_.empty()) throw Timeout(silent_);
      act();
    } catch (const Timeout& late) {
      silent_ = late.what();
      throw Timeout(silence(late), {0});
    } catch (const Refused& gone) {
      throw_error(lost(0, std::string("is gone, at whose endpoint the members meet: ") +
                              gone.what() + "; look at its own log"));
    }
  }

  std::mutex mutex_;
  std::string silent_;  ///< how rank 0 did not answer
  std::atomic<bool> formed_{false};
  EndpointConnection connection_;
  const Deadline deadline_;
  std::atomic<int64_t> round_trip_{0};
};

std::shared_ptr<Store> lend_store(Endpoint& endpoint, int64_t number, int size) {
  return endpoint.lend({number, 0, size, hash_of({std::to_string(size)})});
}

std::shared_ptr<Store> find_store(const std::vector<Address>& addresses, int64_t number, int rank,
                                  int size, const GroupOptions& options, Milliseconds timeout,
                                  std::function<void()> interrupt) {
  const Deadline deadline = Deadline::after(timeout);
  const Handle there = known_handle(addresses, options);
  for (;;) {
    std::string problem;
    try {
      auto store = std::make_shared<RemoteStore>(
          EndpointConnection(there, key_of_secret(options.secret), deadline, interrupt),
          GroupRequest{number, rank, size, hash_of({std::to_string(size)})}, deadline);
      store->formed();  // the group's own connections tell who is lost
      return store;
    } catch (const Refused& early) {  // rank 0 may start last
      problem = early.what();
    } catch (const Timeout& late) {
      throw Timeout("rank " + std::to_string(rank) +
                        ": rank 0 does not listen at MASTER_ADDR and " +
                        "MASTER_PORT: " + late.what(),
                    {0});
    } catch (const Error& other) {
      throw Error("rank " + std::to_string(rank) + ": rank 0 of pycomm does not listen at " +
                  "MASTER_ADDR and MASTER_PORT, or with other PYCOMM_SECRET or PYCOMM_TLS: " +
                  other.what());
    }
    if (deadline.expired()) {
      throw Timeout("rank " + std::to_string(rank) + ": rank 0 did not listen at MASTER_ADDR and " +
                        "MASTER_PORT within " + std::to_string(timeout.count()) + " ms: " + problem,
                    {0});
    }
    if (interrupt) interrupt();
    std::this_thread::sleep_for(kRetry);
  }
}

GroupFormation::GroupFormation(Endpoint& endpoint, int64_t uuid,
                               const std::vector<std::string>& handles, const std::string& secret,
                               Milliseconds timeout, std::function<void()> interrupt)
    : endpoint_(endpoint),
      key_(key_of_secret(secret)),
      deadline_(Deadline::after(timeout)),
      interrupt_(std::move(interrupt)),
      next_check_(Deadline::after(kFirstCheck)),
      refusals_(handles.size(), 0) {
  if (handles.empty()) throw Error("the list of handles is empty; pass one for each rank");
  const Handle& ours = endpoint.handle();
  request_.uuid = uuid;
  request_.rank = -1;
  request_.size = static_cast<int>(handles.size());
  request_.list = hash_of(handles);
  std::map<std::string, int> known;
  for (int r = 0; r < request_.size; r++) {
    Handle handle;
    const std::string who = "the handle of rank " + std::to_string(r);
    handle = Handle::parse(handles[static_cast<size_t>(r)]);
    if (handle.group != ours.group)
      throw Error(who + " (" + handle.where() +
                  ") belongs to another group than this one; pass the handles that "
                  "the same group has on other ranks");
    if (handle.tls != ours.tls)
      throw Error(who + " is of a process that " + (handle.tls ? "encrypts" : "does not encrypt") +
                  ", other than this one; set the same PYCOMM_TLS on all ranks");
    const std::string expected = key_.empty() ? "" : proof_of_secret(key_, handle.id);
    if (!equal_proofs(handle.tag, expected))
      throw Error(who + " is of a process with another secret than this one, or only one of the " +
                  "two was given one; set the same PYCOMM_SECRET on all ranks");
    if (const auto [before, fresh] = known.emplace(handle.id, r); !fresh)
      throw Error(who + " is that of rank " + std::to_string(before->second) +
                  ", too; name each process once");
    if (handle.id == ours.id) request_.rank = r;
    handles_.push_back(std::move(handle));
  }
  if (request_.rank < 0)
    throw Error("the handle of this process is not in the list of " +
                std::to_string(request_.size) +
                " handles; only members of the new group call reconfigure");
  endpoint.claim(uuid, request_.list);
}

void GroupFormation::end(const std::string& failure) {
  if (remote_ && failure.empty()) remote_->formed();
  endpoint_.release(failure);
}

std::string GroupFormation::name_of(int rank) const {
  return "rank " + std::to_string(rank) + " (" + handles_[static_cast<size_t>(rank)].where() + ")";
}

void GroupFormation::throw_gone(int rank, const Error& how) const {
  throw_error(lost(rank,
                   std::string("is gone: ") + how.what() +
                       "; its process has ended, leave its handle out of the list",
                   handles_[static_cast<size_t>(rank)].where()));
}

std::shared_ptr<Store> GroupFormation::store() {
  if (request_.rank == 0) {
    lent_ = endpoint_.lend(request_);
    return lent_;
  }
  for (int refusals = 0;;) {
    try {
      remote_ = std::make_shared<RemoteStore>(
          EndpointConnection(handles_[0], key_, deadline_, interrupt_), request_, deadline_);
      return remote_;
    } catch (const Refused& gone) {
      if (++refusals > kRefusals) throw_gone(0, gone);
      std::this_thread::sleep_for(std::min(kCheckInterval, refusals * kRetry));
    } catch (const Timeout& late) {
      throw Timeout(silence(late), {0});
    }
  }
}

void GroupFormation::check_missing() {
  if (!next_check_.expired() || request_.size == 1) return;
  const MemberStatus now = member_status();
  for (const int rank : now.lost) {
    if (rank >= 0 && rank < request_.size) ask(rank, true);  // rank 0 may say anything
  }
  for (int i = 1; i <= request_.size; i++) {
    const int rank = (last_asked_ + i) % request_.size;
    if (now.present.count(rank)) continue;
    last_asked_ = rank;
    ask(rank, false);
    break;
  }
  next_check_ = Deadline::after(kCheckInterval);
}

MemberStatus GroupFormation::member_status() {
  return lent_ ? lent_->member_status() : remote_->member_status();
}

void GroupFormation::ask(int rank, bool lost) {
  const auto here = [&] { return !lost && member_status().present.count(rank) > 0; };
  const std::string who = name_of(rank);
  int& refusals = refusals_[static_cast<size_t>(rank)];
  FormationState state = FormationState::unknown;
  Digest list = {};
  std::string failure;
  try {
    const Deadline limit = Deadline::after(std::min(kQuestion, deadline_.left()));
    EndpointConnection connection(handles_[static_cast<size_t>(rank)], key_, limit, interrupt_);
    connection.send(MessageWriter(MessageKind::question).number(request_.uuid).finished(), limit);
    MessageReader answer(connection.receive(limit));
    if (answer.kind() != MessageKind::answer) return;
    state = answer.number<FormationState>();
    list = answer.number<Digest>();
    failure = answer.string();
    refusals = 0;
  } catch (const Refused& gone) {
    // One that was here has no listener that is only about to begin.
    if (!lost && (++refusals < kRefusals || here())) return;
    throw_gone(rank, gone);
  } catch (const Timeout&) {  // it is slow, or stopped: the deadline decides
    return;
  } catch (const Unproven& stranger) {
    if (!deadline_.expired()) return;
    throw Error(who + " has not proven who it is: " + stranger.what());
  }
  if (state == FormationState::unknown || here()) return;
  if (lost && state == FormationState::formed) return;
  if (state == FormationState::formed)
    throw Error("the uuid " + std::to_string(request_.uuid) + " was already used by " + who +
                "; give each reconfigure a new one, on all ranks");
  if (!equal_digests(list, request_.list))
    throw WireMismatch(who + " names different handles, or another order, for the group with " +
                       "uuid " + std::to_string(request_.uuid) + " than rank " +
                       std::to_string(request_.rank) + "; pass the same list on all ranks");
  // A member that gives up says more of its reason in the store, which is looked at next.
  if (lost && gave_up_.insert(rank).second) return;
  if (state == FormationState::failed) throw Error(who + " has given up: " + failure);
}

}  // namespace pycomm::tcp
