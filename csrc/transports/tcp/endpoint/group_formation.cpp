// Client side of endpoints: connections, the store of a group, its formation from handles.
#include "transports/tcp/endpoint/group_formation.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/notice.h"
#include "transports/seal.h"
#include "transports/tcp/connect/handshake.h"

namespace pycomm::tcp {
namespace {

// Members that come together need no question, at round trips of 60 ms and less.
constexpr Milliseconds kFirstCheck(600);
constexpr Milliseconds kCheckInterval(300);
// Time that a question may take: four round trips, and a process that is busy.
constexpr Milliseconds kQuestion(3000);
// Refusals of rank 0's port after which one more tells that its process is gone.
constexpr int kRefusals = 2;
// An operation on the store after the group was formed, by the straggler monitor.
constexpr Milliseconds kLateRequest(10000);
// What a member still asks and says when the time is over, or nearly.
constexpr Milliseconds kLastWords(250);
constexpr Milliseconds kRetry(20);
// How often a wait looks whether this rank is to stop.
constexpr Milliseconds kInterruptCheck(50);
// Time that a process has to answer before nothing is known of it.
constexpr Milliseconds kSign(1000);
// Time that an address may take to answer a call where there are others, which need some, too.
constexpr Milliseconds kAddressLimit(3000);
// Pauses before one who has proven nothing is asked again.
constexpr Milliseconds kFirstPause(10), kLastPause(kInterruptCheck);

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
/// Answers come in the order of the questions. Rank 0 is not asked again after one that did not
/// come in time.
class RemoteStore final : public Store {
 public:
  RemoteStore(EndpointConnection connection, int64_t uuid, const Digest& list,
              const Deadline& deadline)
      : connection_(std::move(connection)), deadline_(deadline) {
    round_trip_ = connection_.round_trip().count();
    tell(MessageWriter(MessageKind::join).number(uuid).number(list));
  }
  void set(const std::string& key, const std::string& value) override {
    tell(MessageWriter(MessageKind::set).string(key).string(value));
  }
  std::optional<std::string> find(const std::string& key) override {
    MessageReader value = ask(MessageWriter(MessageKind::find).string(key));
    if (value.number<uint8_t>() == 0) return std::nullopt;
    return value.string();
  }
  bool appends() const override { return true; }
  void append(const std::string& key, const std::string& value) override {
    tell(MessageWriter(MessageKind::append).string(key).string(value));
  }
  int64_t count(const std::string& key) override {
    return ask(MessageWriter(MessageKind::count).string(key)).number<int64_t>();
  }
  void erase(const std::string& key) override {
    tell(MessageWriter(MessageKind::erase).string(key));
  }
  std::chrono::microseconds round_trip() const override {
    return std::chrono::microseconds(round_trip_.load());
  }
  /// The group was formed: later requests have their own time.
  void formed() { formed_ = true; }

 private:
  Deadline deadline() const {
    if (deadline_.left() > kLastWords) return deadline_;
    return Deadline::after(formed_ ? kLateRequest : kLastWords);
  }
  void tell(const MessageWriter& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    explain([&] { connection_.send(message.finished(), deadline()); });
  }
  MessageReader ask(const MessageWriter& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string text;
    const auto start = Deadline::Clock::now();
    explain([&] {
      const Deadline limit = deadline();
      unanswered_++;  // questions before it may have been interrupted
      connection_.send(message.finished(), limit);
      for (; unanswered_ > 0; unanswered_--) text = connection_.receive(limit);
    });
    const auto took =
        std::chrono::duration_cast<std::chrono::microseconds>(Deadline::Clock::now() - start);
    round_trip_ = std::min<int64_t>(round_trip_, took.count());
    MessageReader answer(text);
    if (answer.kind() == MessageKind::value) return answer;
    throw Error("endpoint: rank 0 answers what was not asked");
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
  int unanswered_ = 0;  ///< questions
  std::atomic<bool> formed_{false};
  EndpointConnection connection_;
  const Deadline deadline_;
  std::atomic<int64_t> round_trip_{0};
};

std::shared_ptr<Store> find_store(const Handle& there, int64_t number, int rank,
                                  const GroupOptions& options, Milliseconds timeout,
                                  std::function<void()> interrupt) {
  const Deadline deadline = Deadline::after(timeout);
  const std::string who = "rank " + std::to_string(rank) + ": rank 0 ";
  const std::string where = "listen at " + there.where();
  for (;;) {
    std::string problem;
    try {
      auto store = std::make_shared<RemoteStore>(
          EndpointConnection(there, key_of_secret(options.secret), deadline, interrupt), number,
          Digest{}, deadline);
      store->formed();  // groups have their own deadlines
      return store;
    } catch (const Refused& early) {  // rank 0 may start last
      problem = early.what();
    } catch (const Timeout& late) {
      if (deadline.expired()) throw Timeout(who + "does not " + where + ": " + late.what(), {0});
      problem = late.what();
    } catch (const Error& other) {
      throw Error(who + "of pycomm does not " + where +
                  ", or with other PYCOMM_SECRET or PYCOMM_TLS: " + other.what());
    }
    if (deadline.expired()) {
      throw Timeout(who + "did not " + where + " within " + std::to_string(timeout.count()) +
                        " ms: " + problem,
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
      uuid_(uuid),
      list_(hash_of(handles)),
      next_check_(Deadline::after(kFirstCheck)) {
  if (handles.empty()) throw Error("the list of handles is empty; pass one for each rank");
  const Handle& ours = endpoint.handle();
  std::map<std::string, int> known;
  for (const std::string& text : handles) {
    const int r = size();
    const std::string who = "the handle of rank " + std::to_string(r);
    Handle handle = Handle::parse(text);
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
    if (handle.id == ours.id) rank_ = r;
    handles_.push_back(std::move(handle));
  }
  if (rank_ < 0)
    throw Error("the handle of this process is not in the list of " + std::to_string(size()) +
                " handles; only members of the new group call reconfigure");
  asked_ = rank_;
  endpoint.claim(uuid, list_);
}

void GroupFormation::end(const std::string& failure) {
  if (remote_ && failure.empty()) remote_->formed();
  endpoint_.release(failure);
}

void GroupFormation::throw_gone(int rank, const Error& how) const {
  throw_error(lost(rank,
                   std::string("is gone: ") + how.what() +
                       "; its process has ended, leave its handle out of the list",
                   handles_[static_cast<size_t>(rank)].where()));
}

std::shared_ptr<Store> GroupFormation::store() {
  if (rank_ == 0) return endpoint_.lend(uuid_, list_);
  for (int refusals = 0;;) {
    try {
      remote_ = std::make_shared<RemoteStore>(
          EndpointConnection(handles_[0], key_, deadline_, interrupt_), uuid_, list_, deadline_);
      return remote_;
    } catch (const Refused& gone) {
      if (++refusals > kRefusals) throw_gone(0, gone);
      std::this_thread::sleep_for(std::min(kCheckInterval, refusals * kRetry));
    } catch (const Timeout& late) {
      if (deadline_.expired()) throw Timeout(silence(late), {0});
    }
  }
}

void GroupFormation::check_members() {
  if (!next_check_.expired() || size() == 1) return;
  next_check_ = Deadline::after(kCheckInterval);
  if (!doubtful_) asked_ = (asked_ + 1) % size();
  if (asked_ == rank_) asked_ = (asked_ + 1) % size();
  doubtful_ = ask(asked_, std::exchange(doubtful_, false));
}

/// Returns true if the answer only counts when it is given again.
bool GroupFormation::ask(int rank, bool again) {
  const Handle& handle = handles_[static_cast<size_t>(rank)];
  const std::string who = "rank " + std::to_string(rank) + " (" + handle.where() + ")";
  FormationState state = FormationState::unknown;
  Digest list = {};
  std::string failure;
  try {
    const Deadline limit = Deadline::after(std::min(kQuestion, deadline_.left()));
    EndpointConnection connection(handle, key_, limit, interrupt_);
    connection.send(MessageWriter(MessageKind::question).number(uuid_).finished(), limit);
    MessageReader answer(connection.receive(limit));
    if (answer.kind() != MessageKind::answer) return false;
    state = answer.number<FormationState>();
    list = answer.number<Digest>();
    failure = answer.string();
  } catch (const Refused& gone) {  // the queue of its listener may be full
    if (again) throw_gone(rank, gone);
    return true;
  } catch (const Timeout&) {  // it is slow, or stopped: the deadline decides
    return false;
  } catch (const Unproven& stranger) {  // it may have come although it cannot be reached from here
    if (!deadline_.expired()) return false;
    throw Error(who + " has not proven who it is: " + stranger.what());
  }
  if (state == FormationState::unknown) return false;
  if (list == list_) {
    // A member that gives up says more of its reason in the store, which is looked at before.
    if (state == FormationState::failed && again) throw Error(who + " has given up: " + failure);
    return state == FormationState::failed;
  }
  if (state == FormationState::formed)
    throw Error("the uuid " + std::to_string(uuid_) + " was already used by " + who +
                "; give each reconfigure a new one, on all ranks");
  throw WireMismatch(who + " names different handles, or another order, for the group with uuid " +
                     std::to_string(uuid_) + " than rank " + std::to_string(rank_) +
                     "; pass the same list on all ranks");
}

EndpointConnection::EndpointConnection(const Handle& to, const std::string& given,
                                       const Deadline& deadline, std::function<void()> interrupt)
    : where_(to.where()), interrupt_(std::move(interrupt)) {
  const std::string& secret = to.secret.empty() ? given : to.secret;
  for (Milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLastPause)) {
    const std::string problem = call(to, secret, deadline);
    if (problem.empty()) return;
    if (deadline.left() <= pause) {
      throw Unproven("the process at " + where_ + " is not the one of the handle (" + problem +
                     "); exchange the handles anew");
    }
    std::this_thread::sleep_for(pause);
    if (interrupt_) interrupt_();
  }
}

// What one address says does not keep the others from being tried. If none leads to the process,
// the one counts that leaves most open.
std::string EndpointConnection::call(const Handle& to, const std::string& secret,
                                     const Deadline& deadline) {
  const bool several = to.addresses.size() > 1;
  std::string stranger, refusal, obstacle;
  bool silent = false;  // one of several, at which a live process may be
  for (const Address& address : to.addresses) {
    const auto start = Deadline::Clock::now();
    const auto some = Deadline::after(std::min(kAddressLimit, deadline.left() / 2));
    const Deadline& limit = several ? some : deadline;
    int error = 0;
    Fd fd = connect_to(address, nullptr, error);
    try {
      if (error == 0) wait(fd.get(), POLLOUT, limit);
      if (error == 0) error = pending_error(fd.get());
      if (error == 0) {
        round_trip_ =
            std::chrono::duration_cast<std::chrono::microseconds>(Deadline::Clock::now() - start);
        stranger = greet(std::move(fd), to, secret, limit);
        if (stranger.empty()) return "";
        continue;
      }
    } catch (const Timeout&) {
      if (!several) throw;
      silent = true;
      continue;
    }
    (error == ECONNREFUSED ? refusal : obstacle) = error_text(error);
  }
  if (!stranger.empty()) return stranger;
  if (silent) throw Timeout("not all addresses of " + where_ + " have answered");
  if (!refusal.empty() && !obstacle.empty()) {
    throw Timeout("not all addresses of " + where_ + " can be reached (" + obstacle + ")");
  }
  if (!refusal.empty()) throw Refused("nobody listens at " + where_ + " (" + refusal + ")");
  throw Unproven("no way to " + where_ + ": " + obstacle);
}

std::string EndpointConnection::greet(Fd fd, const Handle& to, const std::string& secret,
                                      const Deadline& deadline) {
  Hello hello;  // as from rank 1 of 2 to rank 0, on its control connection
  hello.size = 2;
  hello.rank = 1;
  hello.sockets = 1;
  hello.lane = kControl;
  hello.tls = to.tls ? 1 : 0;
  Greeting greeting(Handshake(secret, "endpoint " + to.id, hello));
  for (;;) {
    int error = 0;
    switch (greeting.advance(fd.get(), error)) {
      case Greeting::Progress::waits:
        wait(fd.get(), greeting.events(), deadline);
        continue;
      case Greeting::Progress::done:
        socket_ = greeting.sock(std::move(fd));
        return "";
      case Greeting::Progress::refused:
        return greeting.problem();
      case Greeting::Progress::closed:
        return "it closed the connection" + (error != 0 ? ": " + error_text(error) : "");
    }
  }
}

void EndpointConnection::wait(int fd, short events, const Deadline& deadline) const {
  for (;;) {
    pollfd wanted{fd, events, 0};
    const auto pause = std::min<Milliseconds>(kInterruptCheck, deadline.left() + Milliseconds(1));
    if (::poll(&wanted, 1, static_cast<int>(pause.count())) > 0) return;
    if (deadline.expired()) {
      throw Timeout(where_ + " does not answer within " + std::to_string(deadline.limit().count()) +
                    " ms");
    }
    if (interrupt_) interrupt_();
  }
}

void EndpointConnection::send(const std::string& message, const Deadline& deadline) {
  unsent_ += message;
  while (!unsent_.empty()) {
    const ssize_t n = socket_.send(unsent_.data(), unsent_.size());
    if (n >= 0) {
      unsent_.erase(0, static_cast<size_t>(n));
    } else if (errno == EAGAIN || errno == EINTR) {
      wait(socket_.get(), POLLOUT, deadline);
    } else {
      throw Refused("the connection with " + where_ + " is gone: " + error_text(errno));
    }
  }
}

std::string EndpointConnection::receive(const Deadline& deadline) {
  std::string message;
  while (!take_message(arrived_, message)) {
    char buffer[4096];
    const ssize_t n = socket_.receive(buffer, sizeof buffer);
    if (n > 0) {
      arrived_.append(buffer, static_cast<size_t>(n));
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      wait(socket_.get(), POLLIN, deadline);
    } else {
      throw Refused("the connection with " + where_ + " is gone");
    }
  }
  return message;
}

bool is_gone(const Handle& handle, const std::string& secret, std::function<void()> interrupt) {
  try {
    EndpointConnection(handle, key_of_secret(secret), Deadline::after(kSign), std::move(interrupt));
  } catch (const Refused&) {
    return true;
  } catch (const Error&) {  // it does not answer, or there is no way to it
  }
  return false;
}

}  // namespace pycomm::tcp
