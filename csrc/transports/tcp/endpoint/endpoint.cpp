// Server side of endpoints: one thread, which serves all callers.
#include "transports/tcp/endpoint/endpoint.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/error.h"
#include "core/thread.h"
#include "transports/openssl.h"
#include "transports/seal.h"
#include "transports/tcp/connect/handshake.h"
#include "transports/tcp/connect/peers.h"

namespace pycomm::tcp {

// As for connections of ranks: the limit of a greeting, and of those that are under way.
constexpr auto kGreetingLimit = std::chrono::seconds(10);
constexpr size_t kMaxCallers = 1024;
constexpr auto kAcceptBackoff = Milliseconds(50);
constexpr int kLongestPause = 1000;
// What is kept of the text of an error, for members that ask.
constexpr size_t kLongestFailure = 500;
// A store that nobody uses any more is kept while it is among the last few.
constexpr size_t kKeptStores = 8;
// What members publish is some hundred bytes for each rank and topic.
constexpr size_t kLargestStore = size_t{64} << 20;
// What waits for a caller that asks and does not read; until it does, it is not read from.
constexpr size_t kMostUnread = size_t{1} << 20;

struct Endpoint::Caller {
  Fd fd;
  std::optional<Greeting> greeting;  ///< none once it is authenticated
  Deadline::Clock::time_point wake;  ///< when to give up the greeting
  SecureSocket socket;
  std::string in, out;
  std::shared_ptr<Store> store;
  bool over = false;

  int descriptor() const { return greeting ? fd.get() : socket.get(); }
};

namespace {

TcpListeners listen_anywhere(const GroupOptions& options) {
  try {
    return listen(options, false);
  } catch (const Error&) {
    if (!options.interface.empty()) throw;
    return listen(options, true);  // a machine without a network
  }
}

}  // namespace

Endpoint::Endpoint(const std::string& group, const GroupOptions& options) {
  TcpListeners ours = listen_anywhere(options);
  secret_ = ours.secret;
  listeners_ = std::move(ours.sockets);
  handle_.group = hash_of_group(group);
  handle_.id = random_secret().substr(0, 16);
  openssl::warn_of_weakness(options);
  handle_.tls = encrypts(options);
  if (!options.secret.empty()) handle_.tag = proof_of_secret(secret_, handle_.id);
  if (options.secret.empty()) handle_.secret = secret_;
  handle_.addresses = std::move(ours.addresses);
  start();
}

Endpoint::Endpoint(const Address& at, const GroupOptions& options)
    : handle_(known_handle({at}, options)) {
  secret_ = options.secret.empty() ? handle_.secret : key_of_secret(options.secret);
  if (encrypts(options)) openssl::library();  // throws what to install
  openssl::warn_of_weakness(options);
  listeners_.push_back(listen_on(at, {at.port(), at.port()}));
  start();
}

void Endpoint::start() {
  wake_ = Fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_) throw_errno("endpoint: cannot make an eventfd");
  thread_ =
      std::make_unique<std::thread>(start_thread("endpoint: this process", [this] { run(); }));
}

Endpoint::~Endpoint() {
  if (fork_.in_child()) {  // the thread does not exist here
    static_cast<void>(thread_.release());
    return;
  }
  stop_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
  thread_->join();
}

void Endpoint::claim(int64_t uuid, const Digest& list) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!claims_.insert({uuid, {FormationState::forms, list, ""}}).second) {
    throw Error("the uuid " + std::to_string(uuid) +
                " was already used by this process; give each reconfigure a new one");
  }
  current_ = uuid;
}

void Endpoint::release(const std::string& failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!current_) return;
  Claim& claim = claims_[*current_];
  claim.state = failure.empty() ? FormationState::formed : FormationState::failed;
  claim.failure = failure.substr(0, kLongestFailure);
  current_.reset();
}

std::shared_ptr<Store> Endpoint::lend(int64_t uuid, const Digest& list) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto store = stores_[{uuid, list}].lock()) return store;
  const auto store = make_local_store(true, kLargestStore);
  stores_[{uuid, list}] = store;
  last_stores_.push_back(store);
  if (last_stores_.size() > kKeptStores) last_stores_.pop_front();
  for (auto it = stores_.begin(); it != stores_.end();) {
    it = it->second.expired() ? stores_.erase(it) : std::next(it);
  }
  return store;
}

// ------------------------------------------------------------------ the thread

void Endpoint::run() {
  std::vector<pollfd> fds;
  while (!stop_) {
    const auto now = Deadline::Clock::now();
    int pause = kLongestPause;
    fds.clear();
    fds.push_back({wake_.get(), POLLIN, 0});
    const bool accepts = now >= accept_backoff_until_;
    for (const Fd& listener : listeners_) {
      fds.push_back({listener.get(), static_cast<short>(accepts ? POLLIN : 0), 0});
    }
    if (!accepts) pause = static_cast<int>(kAcceptBackoff.count());
    for (const Caller& caller : callers_) {
      short events = caller.greeting                   ? caller.greeting->events()
                     : caller.out.size() < kMostUnread ? POLLIN
                                                       : 0;
      if (!caller.greeting && !caller.out.empty()) events |= POLLOUT;
      fds.push_back({caller.descriptor(), events, 0});
    }
    ::poll(fds.data(), fds.size(), pause);
    uint64_t count;
    [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &count, sizeof count);
    size_t i = 1 + listeners_.size();
    for (Caller& caller : callers_) {
      const bool late = caller.greeting && Deadline::Clock::now() >= caller.wake;
      if (fds[i++].revents != 0) serve(caller);
      caller.over = caller.over || (late && caller.greeting);
    }
    callers_.remove_if([](const Caller& caller) { return caller.over; });
    for (const Fd& listener : listeners_) {
      if (accepts) accept_all(listener);
    }
  }
}

void Endpoint::accept_all(const Fd& listener) {
  while (Fd fd = accept_from(listener.get())) {
    if (callers_.size() >= kMaxCallers) {  // the oldest that has not authenticated makes room
      const auto oldest = std::find_if(callers_.begin(), callers_.end(), [](const Caller& caller) {
        return caller.greeting.has_value();
      });
      if (oldest == callers_.end()) return;
      callers_.erase(oldest);
    }
    callers_.emplace_back();
    callers_.back().fd = std::move(fd);
    callers_.back().greeting.emplace(
        Handshake(secret_, "endpoint " + handle_.id, 0, 2, 1, handle_.tls));
    callers_.back().wake = Deadline::Clock::now() + kGreetingLimit;
  }
  if (lacks_descriptor(errno)) accept_backoff_until_ = Deadline::Clock::now() + kAcceptBackoff;
}

void Endpoint::serve(Caller& caller) {
  try {
    if (caller.greeting) {
      int error = 0;
      const auto progress = caller.greeting->advance(caller.fd.get(), error);
      if (progress == Greeting::Progress::waits) return;
      caller.over = progress != Greeting::Progress::done;
      if (caller.over) return;
      caller.socket = caller.greeting->sock(std::move(caller.fd));
      caller.greeting.reset();
    }
    for (bool again = true; again && !caller.over;) {
      read(caller);
      const bool full = caller.out.size() >= kMostUnread;
      write(caller);
      again = full && caller.out.size() < kMostUnread;
    }
  } catch (const std::exception&) {  // a member that does not keep to the protocol
    caller.over = true;
  }
}

void Endpoint::read(Caller& caller) {
  char buffer[4096];
  while (caller.out.size() < kMostUnread) {
    const ssize_t n = caller.socket.receive(buffer, sizeof buffer);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (n <= 0) {
      caller.over = true;
      return;
    }
    caller.in.append(buffer, static_cast<size_t>(n));
    for (std::string message; take_message(caller.in, message);) obey(caller, message);
  }
}

void Endpoint::write(Caller& caller) {
  while (!caller.over && !caller.out.empty()) {
    const ssize_t n = caller.socket.send(caller.out.data(), caller.out.size());
    if (n < 0) {
      caller.over = errno != EAGAIN && errno != EINTR;
      return;
    }
    caller.out.erase(0, static_cast<size_t>(n));
  }
}

void Endpoint::obey(Caller& caller, const std::string& text) {
  MessageReader message(text);
  const MessageKind kind = message.kind();
  if (kind == MessageKind::question) {
    const auto uuid = message.number<int64_t>();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = claims_.find(uuid);
    const Claim claim =
        found != claims_.end() ? found->second : Claim{FormationState::unknown, {}, ""};
    caller.out += MessageWriter(MessageKind::answer)
                      .number(claim.state)
                      .number(claim.list)
                      .string(claim.failure)
                      .finished();
    return;
  }
  if (kind == MessageKind::join) {
    const auto uuid = message.number<int64_t>();
    caller.store = lend(uuid, message.number<Digest>());
    return;
  }
  if (!caller.store) throw Error("endpoint: a caller has joined no group");
  const std::string key = message.string();
  switch (kind) {
    case MessageKind::set:
      return caller.store->set(key, message.string());
    case MessageKind::append:
      return caller.store->append(key, message.string());
    case MessageKind::find: {
      const auto value = caller.store->find(key);
      caller.out += MessageWriter(MessageKind::value)
                        .number(static_cast<uint8_t>(value ? 1 : 0))
                        .string(value.value_or(""))
                        .finished();
      return;
    }
    case MessageKind::count:
      caller.out += MessageWriter(MessageKind::value).number(caller.store->count(key)).finished();
      return;
    case MessageKind::erase:
      return caller.store->erase(key);
    default:
      throw Error("endpoint: a caller asks what is not known");
  }
}

}  // namespace pycomm::tcp
