#include "collectives/point_to_point/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/interrupt.h"
#include "core/thread.h"

namespace pycomm {
namespace {

// Time in which a caller can start to wait before our thread takes over: a wake-up would only slow
// down a pair of blocking calls.
constexpr Milliseconds kGrace{1};
// Time that our thread sleeps on the mesh: a new request cannot be posted meanwhile. It is longer
// once nothing has moved for a while, to save processor time.
constexpr std::chrono::microseconds kIdle{200};
constexpr std::chrono::microseconds kLongIdle{2000};
constexpr int kIdlesBeforeLong = 100;

Span<uint8_t> bytes_of(void* data, size_t bytes) { return {static_cast<uint8_t*>(data), bytes}; }

}  // namespace

/// A posted send or receive, and how it travels.
class PointToPoint::Request final : public Transfer {
 public:
  Request(std::shared_ptr<PointToPoint> owner, bool is_send, void* data, size_t bytes, int peer,
          int tag, Milliseconds limit)
      : owner(std::move(owner)),
        is_send(is_send),
        data(data),
        bytes(bytes),
        tag(tag),
        peer(peer),
        limit(limit),
        recording(this->owner->trace_.start(describing_tag())) {}

  bool done() override {
    check_process();
    std::lock_guard<std::mutex> lock(owner->mutex_);
    return finished || owner->closed_ || owner->failure_.happened();
  }
  void wait(Milliseconds asked) override {
    check_process();
    owner->wait(*this, asked.count() > 0 ? asked : limit);
  }
  int source() const override {
    check_process();
    std::lock_guard<std::mutex> lock(owner->mutex_);
    return from;
  }
  void keep(std::shared_ptr<void> thing) override {
    std::lock_guard<std::mutex> lock(owner->mutex_);
    if (!finished && !owner->closed_) kept.swap(thing);
  }

  /// A forked child must not move what is under way in its parent, nor take its locks.
  void check_process() const {
    if (!owner->fork_.in_child()) return;
    owner->fork_.refuse("rank " + std::to_string(owner->rank_), is_send ? "send" : "recv");
  }
  bool matches(int source, int64_t tag) const {
    return (peer < 0 || peer == source) && this->tag == tag;
  }
  OpTag describing_tag() const { return peer_tag(is_send ? Op::send : Op::recv, bytes, peer, tag); }
  std::string describe() const {
    return "rank " + std::to_string(owner->rank_) + ": " + pycomm::describe(describing_tag());
  }
  void expect(uint64_t theirs, int source) const {
    if (theirs == bytes) return;
    throw WireMismatch(describe() + " does not match a " + (is_send ? "recv" : "send") + " of " +
                       std::to_string(theirs) + " bytes " + (is_send ? "on" : "from") + " rank " +
                       std::to_string(source) + "; both ends must name the same size");
  }

  const std::shared_ptr<PointToPoint> owner;
  const bool is_send;
  void* const data;
  const uint64_t bytes;
  const int64_t tag;
  const int peer;  // -1: any
  const Milliseconds limit;
  const uint64_t recording;  // number in the trace
  Header header;             // of a send, while it is under way
  bool ready = false;        // of a receive: its peer knows the place
  uint64_t ticket = 0;
  bool finished = false;
  int from = -1;
  std::exception_ptr error;
  std::shared_ptr<void> kept;  // until it is done
};

// Takes the lock, and releases it before what is to be released is destroyed.
class PointToPoint::UnlockingGuard {
 public:
  explicit UnlockingGuard(PointToPoint& self) : self_(self), lock_(self.mutex_) {}
  ~UnlockingGuard() { self_.release_unneeded(lock_); }
  UnlockingGuard(const UnlockingGuard&) = delete;
  Lock& lock() { return lock_; }

 private:
  PointToPoint& self_;
  Lock lock_;
};

PointToPoint::PointToPoint(ChannelMesh& mesh, Failure& failure, Trace& trace,
                           std::function<void()> over)
    : mesh_(mesh),
      rank_(mesh.rank()),
      failure_(failure),
      trace_(trace),
      over_(std::move(over)),
      peers_(mesh.size()) {}

void PointToPoint::close() {
  const std::lock_guard<std::mutex> closing(closing_);
  {
    Lock lock(mutex_);
    closed_ = true;
    server_.notify_all();
    changed_.notify_all();
    // Threads sleep on the mesh without the lock, and the mesh may be destroyed after this.
    changed_.wait(lock, [this] { return !sleeping_ && waiting_ == 0 && entering_ == 0; });
  }
  if (thread_.joinable()) thread_.join();
}

void PointToPoint::forget() {
  std::vector<RequestPtr> undone;  // each holds what it keeps, which holds the request
  std::vector<std::shared_ptr<void>> kept;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    undone.assign(posted_.begin(), posted_.end());
    for (Peer& peer : peers_) {
      undone.insert(undone.end(), peer.sends.begin(), peer.sends.end());
      undone.insert(undone.end(), peer.offered.begin(), peer.offered.end());
      for (const auto& [place, request] : peer.places) undone.push_back(request);
      if (peer.target) undone.push_back(peer.target);
    }
    for (const Unexpected& message : unexpected_) {
      if (message.claimed) undone.push_back(message.claimed);
    }
    for (const RequestPtr& request : undone) kept.push_back(std::move(request->kept));
    kept.insert(kept.end(), unneeded_.begin(), unneeded_.end());
    unneeded_.clear();
    peers_.clear();
    posted_.clear();
    unexpected_.clear();
  }
}

void PointToPoint::release_unneeded(Lock& lock) {
  const std::vector<std::shared_ptr<void>> unneeded = std::move(unneeded_);
  unneeded_.clear();
  lock.unlock();
}

void PointToPoint::check_open(const Request& request) const {
  if (closed_)
    throw Error(request.describe() + " was not done when its group was closed; wait for it first");
}

std::shared_ptr<Transfer> PointToPoint::send(const void* data, size_t bytes, int dst, int tag,
                                             Milliseconds limit) {
  return post(std::make_shared<Request>(shared_from_this(), true, const_cast<void*>(data), bytes,
                                        dst, tag, limit));
}

std::shared_ptr<Transfer> PointToPoint::recv(void* data, size_t bytes, int src, int tag,
                                             Milliseconds limit) {
  return post(std::make_shared<Request>(shared_from_this(), false, data, bytes, src, tag, limit));
}

std::shared_ptr<Transfer> PointToPoint::post(const RequestPtr& request) {
  UnlockingGuard guard(*this);
  check_open(*request);
  if (!thread_.joinable()) {  // first: nobody else would move the bytes of what is posted
    try {
      thread_ = start_thread("rank " + std::to_string(rank_), [this] { serve(); });
    } catch (...) {
      trace_.end(request->recording, false);
      throw;
    }
  }
  try {
    enter(guard.lock());
    request->is_send ? post_send(request) : post_recv(request);
    step();
  } catch (...) {
    check_open(*request);
    end_in(*request);
  }
  wake_server();
  return request;
}

// Fails the request: the group has failed, and the texts of its error say what this rank was doing.
void PointToPoint::end_in(const Request& request) {
  const OpTag tag = request.describing_tag();
  mesh_.rank_state().wait_for(tag);
  trace_.end(request.recording, false);
  over_();
  failure_.rethrow_in(tag, rank_);
}

// Waits until no thread sleeps on the mesh.
void PointToPoint::enter(Lock& lock) {
  failure_.rethrow();
  if (sleeping_) {
    entering_++;
    changed_.wait(lock, [this] { return !sleeping_; });
    if (--entering_ == 0) changed_.notify_all();
    if (closed_) {
      throw Error("rank " + std::to_string(rank_) +
                  ": the group was closed while a send or receive was posted");
    }
  }
}

void PointToPoint::post_send(const RequestPtr& request) {
  outstanding_++;
  const int dst = request->peer;
  if (dst == rank_) {  // kept like a message that arrives before its receive
    const auto match = std::find_if(posted_.begin(), posted_.end(), [&](const RequestPtr& posted) {
      return posted->matches(dst, request->tag);
    });
    const auto* from = static_cast<const uint8_t*>(request->data);
    if (match != posted_.end()) {
      const RequestPtr receiver = *match;
      receiver->expect(request->bytes, dst);
      posted_.erase(match);
      if (request->bytes > 0) std::memcpy(receiver->data, from, request->bytes);
      finish(receiver, dst);
    } else {
      Header header;
      header.tag = request->tag;
      unexpected_.push_back({dst, header, {from, from + request->bytes}, true});
    }
    return finish(request, dst);
  }
  Peer& peer = peers_[dst];
  if (peer.lost) return finish(request, dst, peer.lost);
  if (std::find(active_.begin(), active_.end(), dst) == active_.end()) active_.push_back(dst);
  const uint64_t cost = request->bytes + kMessageCost;
  if (request->bytes <= kEagerBytes && peer.eager_bytes + cost <= kKeptBytes) {
    peer.eager_bytes += cost;
    return send_bytes(request, Kind::eager, 0);
  }
  const auto place = std::find_if(peer.ready.begin(), peer.ready.end(),
                                  [&](const Header& ready) { return ready.tag == request->tag; });
  if (place != peer.ready.end()) {
    const Header ready = *place;
    peer.ready.erase(place);
    request->expect(ready.bytes, dst);
    return send_bytes(request, Kind::payload, ready.place);
  }
  // The place may be ready before the offer is sent, so the header is not the request's own.
  send_note(dst, {request->bytes, request->tag, 0, Kind::offer});
  peer.offered.push_back(request);
  listen(dst);
}

void PointToPoint::send_bytes(const RequestPtr& request, Kind kind, uint64_t place) {
  request->header = {request->bytes, request->tag, place, kind};
  const int dst = request->peer;
  request->ticket = mesh_.send(kLane, dst, kLaneTag, bytes_of(&request->header, sizeof(Header)));
  if (request->bytes > 0) {
    request->ticket = mesh_.send(kLane, dst, kLaneTag, bytes_of(request->data, request->bytes));
  }
  peers_[dst].sends.push_back(request);
}

void PointToPoint::send_note(int peer, const Header& header) {
  auto& notes = peers_[peer].notes;  // a deque: what it holds stays in place
  notes.push_back({header});
  Note& note = notes.back();
  note.ticket = mesh_.send(kLane, peer, kLaneTag, bytes_of(&note.header, sizeof(Header)));
}

void PointToPoint::make_ready(int rank, const RequestPtr& request) {
  Peer& peer = peers_[rank];
  request->ready = true;
  peer.places[++peer.last_place] = request;
  send_note(rank, {request->bytes, request->tag, peer.last_place, Kind::ready});
}

// Credit is sent rarely, since a note costs as much as a short message.
void PointToPoint::give_credit(int rank, uint64_t bytes) {
  if (rank == rank_) return;
  Peer& peer = peers_[rank];
  peer.credit += bytes + kMessageCost;
  if (peer.credit < kKeptBytes / 2 || peer.lost) return;
  send_note(rank, {peer.credit, 0, 0, Kind::credit});
  peer.kept -= peer.credit;
  peer.credit = 0;
}

void PointToPoint::post_recv(const RequestPtr& request) {
  outstanding_++;
  const auto match =
      std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& message) {
        return !message.claimed && request->matches(message.peer, message.header.tag);
      });
  if (match != unexpected_.end()) {
    const int source = match->peer;
    if (match->header.kind == Kind::offer) {
      request->expect(match->header.bytes, source);
      unexpected_.erase(match);
      return make_ready(source, request);
    }
    request->expect(match->data.size(), source);
    if (!match->complete) {
      match->claimed = request;
      return;
    }
    std::copy(match->data.begin(), match->data.end(), static_cast<uint8_t*>(request->data));
    unexpected_.erase(match);
    give_credit(source, request->bytes);
    return finish(request, source);
  }
  posted_.push_back(request);
  std::exception_ptr lost;
  bool somebody = false;
  for (int r = 0; r < mesh_.size(); r++) {
    if (r == rank_ || (request->peer >= 0 && request->peer != r)) continue;
    listen(r);
    if (peers_[r].lost) {
      lost = peers_[r].lost;
    } else {
      somebody = true;
    }
  }
  if (lost && !somebody) {
    posted_.pop_back();
    return finish(request, -1, lost);
  }
  // Receives that were posted before it, and whose places its peer does not know, come first.
  const bool first = std::none_of(posted_.begin(), posted_.end(), [&](const RequestPtr& posted) {
    return posted != request && !posted->ready && posted->matches(request->peer, request->tag);
  });
  if (request->bytes > kEagerBytes && request->peer >= 0 && request->peer != rank_ && first) {
    make_ready(request->peer, request);
  }
}

void PointToPoint::listen(int rank) {
  Peer& peer = peers_[rank];
  if (peer.listening || peer.lost) return;
  if (std::find(active_.begin(), active_.end(), rank) == active_.end()) active_.push_back(rank);
  peer.listening = true;
  peer.in_payload = false;
  peer.ticket = mesh_.recv(kLane, rank, kLaneTag, bytes_of(&peer.header, sizeof(Header)));
}

// ------------------------------------------------------------------------------ what arrives

bool PointToPoint::step() {
  bool moved = false;
  for (size_t i = 0; i < active_.size(); i++) {
    const int rank = active_[i];
    if (peers_[rank].lost) continue;
    std::exception_ptr lost;
    try {
      moved |= mesh_.progress(kLane, rank);
    } catch (const PeerLost&) {
      lost = std::current_exception();
    }
    try {
      if (settle(rank)) {  // it may have closed because it has all it wanted
        moved = true;
      } else if (lost) {
        lose(rank, lost);
      }
    } catch (const PeerLost&) {
      lose(rank, std::current_exception());
    }
  }
  return moved;
}

// Records what has been sent to and received from a peer.
bool PointToPoint::settle(int rank) {
  Peer& peer = peers_[rank];
  bool moved = false;
  while (!peer.sends.empty() && mesh_.sent(kLane, rank, peer.sends.front()->ticket)) {
    finish(peer.sends.front(), rank);
    peer.sends.pop_front();
    moved = true;
  }
  while (!peer.notes.empty() && mesh_.sent(kLane, rank, peer.notes.front().ticket)) {
    peer.notes.pop_front();
  }
  while (peer.listening && mesh_.received(kLane, rank, peer.ticket)) {
    if (peer.in_payload) {
      on_payload(rank);
    } else {
      on_header(rank);
    }
    moved = true;
  }
  return moved;
}

void PointToPoint::on_header(int rank) {
  Peer& peer = peers_[rank];
  const Header header = peer.header;
  if (header.kind == Kind::eager) check_eager(rank);
  if (header.kind == Kind::eager || header.kind == Kind::offer) return on_message(rank);
  if (header.kind == Kind::payload) {
    const auto place = peer.places.find(header.place);
    if (place == peer.places.end() || place->second->bytes != header.bytes) {
      throw_protocol_error(rank, "bytes for which no receive is ready");
    }
    peer.target = place->second;
    peer.places.erase(place);
    posted_.remove(peer.target);
    peer.in_payload = true;
    peer.ticket = mesh_.recv(kLane, rank, kLaneTag, bytes_of(peer.target->data, header.bytes));
    return;
  }
  if (header.kind == Kind::ready) {
    on_ready(rank);
  } else if (header.kind == Kind::credit) {
    peer.eager_bytes -= std::min(header.bytes, peer.eager_bytes);
  } else {
    throw_protocol_error(rank, "a message of an unknown kind");
  }
  peer.listening = false;
  listen(rank);
}

// The sender keeps to these bounds; they are checked here before memory is allocated.
void PointToPoint::check_eager(int rank) {
  Peer& peer = peers_[rank];
  const uint64_t bytes = peer.header.bytes;
  if (bytes > kEagerBytes) {
    throw_protocol_error(rank, "a short message of " + std::to_string(bytes) + " bytes");
  }
  peer.kept += bytes + kMessageCost;
  if (peer.kept > kKeptBytes) throw_protocol_error(rank, "more short messages than it may");
}

void PointToPoint::throw_protocol_error(int rank, const std::string& what) const {
  throw Error("rank " + std::to_string(rank_) + ": rank " + std::to_string(rank) + " sends " +
              what + "; install the same pycomm on all hosts");
}

void PointToPoint::on_ready(int rank) {
  Peer& peer = peers_[rank];
  const Header header = peer.header;
  const auto match =
      std::find_if(peer.offered.begin(), peer.offered.end(),
                   [&](const RequestPtr& request) { return request->tag == header.tag; });
  if (match == peer.offered.end()) return peer.ready.push_back(header);
  const RequestPtr request = *match;
  peer.offered.erase(match);
  request->expect(header.bytes, rank);
  send_bytes(request, Kind::payload, header.place);
}

// Handles an offer, or a message whose bytes follow.
void PointToPoint::on_message(int rank) {
  Peer& peer = peers_[rank];
  const Header header = peer.header;
  RequestPtr request;
  const auto match = std::find_if(posted_.begin(), posted_.end(), [&](const RequestPtr& posted) {
    return posted->matches(rank, header.tag);
  });
  if (match != posted_.end()) {
    request = *match;
    request->expect(header.bytes, rank);
    posted_.erase(match);
  }
  if (header.kind == Kind::offer) {
    if (request) {
      if (!request->ready) make_ready(rank, request);
    } else {
      unexpected_.push_back({rank, header, {}, true});
    }
    peer.listening = false;
    return listen(rank);
  }
  peer.target = request;
  peer.in_payload = true;
  if (!request) {
    peer.unexpected =
        unexpected_.insert(unexpected_.end(), {rank, header, std::vector<uint8_t>(header.bytes)});
  }
  if (header.bytes == 0) return on_payload(rank);
  void* place = request ? request->data : peer.unexpected->data.data();
  peer.ticket = mesh_.recv(kLane, rank, kLaneTag, bytes_of(place, header.bytes));
}

void PointToPoint::on_payload(int rank) {
  Peer& peer = peers_[rank];
  const bool eager = peer.header.kind == Kind::eager;
  if (peer.target) {
    if (eager) give_credit(rank, peer.header.bytes);
    finish(peer.target, rank);
    peer.target = nullptr;
  } else {
    Unexpected& message = *peer.unexpected;
    message.complete = true;
    if (message.claimed) {
      std::copy(message.data.begin(), message.data.end(),
                static_cast<uint8_t*>(message.claimed->data));
      give_credit(rank, message.data.size());
      finish(message.claimed, rank);
      unexpected_.erase(peer.unexpected);
    }
  }
  peer.listening = false;
  listen(rank);
}

void PointToPoint::finish(const RequestPtr& request, int source, std::exception_ptr error) {
  request->from = source;
  if (request->peer < 0) trace_.set_root(request->recording, source);
  trace_.end(request->recording, !error);
  request->error = std::move(error);
  request->finished = true;
  if (request->kept) unneeded_.push_back(std::move(request->kept));
  outstanding_--;
  changed_.notify_all();
}

// A peer that has closed its connection is no error until a request needs it.
void PointToPoint::lose(int rank, const std::exception_ptr& error) {
  Peer& peer = peers_[rank];
  if (peer.lost) return;
  peer.lost = error;
  peer.listening = false;
  for (const RequestPtr& request : peer.sends) finish(request, rank, error);
  peer.sends.clear();
  for (const RequestPtr& request : peer.offered) finish(request, rank, error);
  peer.offered.clear();
  for (const auto& [place, request] : peer.places) {
    posted_.remove(request);
    finish(request, rank, error);
  }
  peer.places.clear();
  if (peer.target) finish(peer.target, rank, error);
  peer.target = nullptr;
  for (auto message = unexpected_.begin(); message != unexpected_.end();) {
    const bool broken =
        message->peer == rank && (!message->complete || message->header.kind == Kind::offer);
    if (broken && message->claimed) finish(message->claimed, rank, error);
    message = broken ? unexpected_.erase(message) : std::next(message);
  }
  bool nobody = true;
  for (int r = 0; r < mesh_.size(); r++) nobody &= r == rank_ || peers_[r].lost;
  for (auto request = posted_.begin(); request != posted_.end();) {
    const bool unmatchable = (*request)->peer == rank || ((*request)->peer < 0 && nobody);
    if (unmatchable) finish(*request, rank, error);
    request = unmatchable ? posted_.erase(request) : std::next(request);
  }
}

void PointToPoint::look_for_failures() {
  try {
    mesh_.check(kLane);
  } catch (const PeerLost& e) {
    if (e.rank < 0 || e.rank >= mesh_.size()) throw;
    lose(e.rank, std::current_exception());
    for (const int peer : mesh_.lost_ones(kLane)) lose(peer, std::current_exception());
  }
}

// ------------------------------------------------------------------------------ waiting, and the
// thread

// Sleeps without the lock, then admits the threads that want to post.
void PointToPoint::sleep_unlocked(Lock& lock, const std::function<void()>& how) {
  sleeping_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    how();
  } catch (...) {  // such as no memory: no thread may wait for the end of this sleep forever
    error = std::current_exception();
  }
  lock.lock();
  sleeping_ = false;
  changed_.notify_all();
  if (error) std::rethrow_exception(error);
  changed_.wait(lock, [this] { return entering_ == 0; });
}

void PointToPoint::wait(Request& request, Milliseconds limit) {
  UnlockingGuard guard(*this);
  waiting_++;
  try {
    drive(guard.lock(), request, limit);
    waiting_--;
  } catch (const Interrupted&) {  // what its caller does with the buffer is not known
    waiting_--;
    mesh_.rank_state().wait_for(request.describing_tag());
    trace_.end(request.recording, false);
    if (!closed_) over_();
    changed_.notify_all();
    throw;
  } catch (...) {
    waiting_--;
    if (!closed_) end_in(request);
    changed_.notify_all();  // the thread that closes waits for us
    throw;                  // the group has failed
  }
  if (closed_) return changed_.notify_all();
  wake_server();
}

// Moves bytes, or waits for the thread that does, until the request is done.
void PointToPoint::drive(Lock& lock, const Request& request, Milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  std::optional<OpTag> shown;
  InterruptPoll interrupts;
  for (int quiet = 0; !request.finished; quiet++) {
    check_open(request);
    failure_.rethrow();
    if (deadline.expired()) {
      throw Timeout(request.describe() + " did not end within the timeout of " +
                    std::to_string(limit.count()) + " ms; check that the other end " +
                    (request.is_send ? "receives" : "sends") + " with the same tag");
    }
    if (sleeping_) {
      changed_.wait_for(lock, std::min(deadline.left(), Milliseconds(10)));
      lock.unlock();
      try {
        interrupts.check();
      } catch (...) {
        lock.lock();
        throw;
      }
      lock.lock();
    } else if (step()) {
      quiet = 0;
    } else if (!request.finished) {
      if (!shown) {
        shown = request.describing_tag();
        shown_.push_back(*shown);
        mesh_.rank_state().wait_for(*shown);
      }
      if (mesh_.should_check(quiet)) look_for_failures();
      sleep_unlocked(lock, [&] {
        interrupts.check();
        mesh_.pause(kLane, quiet, deadline);
      });
    }
  }
  if (request.error) std::rethrow_exception(request.error);
  if (!shown) return;
  const auto same = [&](const OpTag& other) { return other.hash() == shown->hash(); };
  shown_.erase(std::find_if(shown_.begin(), shown_.end(), same));
  mesh_.rank_state().wait_for(shown_.empty() ? OpTag() : shown_.back());
}

void PointToPoint::wake_server() {
  if (outstanding_ > 0 && waiting_ == 0 && !serving_ && !closed_) server_.notify_one();
}

void PointToPoint::serve() {
  Lock lock(mutex_);
  const auto needed = [this] { return outstanding_ > 0 && waiting_ == 0 && !failure_.happened(); };
  while (!closed_) {
    serving_ = false;
    server_.wait(lock, [&] { return closed_ || needed(); });
    serving_ = true;
    server_.wait_for(lock, kGrace, [this] { return closed_; });
    try {
      for (int quiet = 0; !closed_ && needed(); quiet++) {
        const bool moved = step();
        if (!moved) look_for_failures();
        if (!unneeded_.empty()) {
          release_unneeded(lock);
          lock.lock();
        }
        if (moved) {
          quiet = 0;
          continue;
        }
        const auto limit = quiet < kIdlesBeforeLong ? kIdle : kLongIdle;
        sleep_unlocked(lock, [&] { mesh_.idle(kLane, limit); });
      }
    } catch (...) {
      over_();
      changed_.notify_all();  // those that wait throw it
    }
  }
}

}  // namespace pycomm
