#include "collectives/point_to_point.h"

#include <algorithm>
#include <cstring>

namespace pycomm {
namespace {

constexpr Lane kLane = Lane::point_to_point;
// The time a caller has to wait itself before our thread takes over: a wake-up would only slow down
// a pair of blocking calls.
constexpr Milliseconds kGrace{1};
// How long our thread sleeps on the mesh: a new request cannot be posted meanwhile. Longer once
// nothing has moved for a while, to leave the processor alone.
constexpr std::chrono::microseconds kNap{200};
constexpr std::chrono::microseconds kLongNap{2000};
constexpr int kNapsBeforeLong = 100;

// Headers and bytes of all messages carry the same tag; the header says what they are.
OpTag lane_tag() {
  OpTag tag;
  tag.op = Op::send;
  tag.dtype = DType::uint8;
  return tag;
}
const OpTag kTag = lane_tag();

Span<uint8_t> bytes_of(void* data, size_t bytes) { return {static_cast<uint8_t*>(data), bytes}; }

}  // namespace

class PointToPoint::Request final : public Communicator::Request {
 public:
  Request(std::shared_ptr<PointToPoint> owner, bool is_send, void* data, size_t bytes, int peer,
          int tag, Milliseconds limit)
      : owner(std::move(owner)),
        is_send(is_send),
        data(data),
        header{bytes, tag},
        peer(peer),
        limit(limit),
        recording(this->owner->trace_.start(describing_tag())) {}

  bool done() override {
    std::lock_guard<std::mutex> lock(owner->mutex_);
    return finished;
  }
  void wait(Milliseconds asked) override { owner->wait(*this, asked.count() > 0 ? asked : limit); }
  int source() const override {
    std::lock_guard<std::mutex> lock(owner->mutex_);
    return from;
  }

  bool matches(int source, int64_t tag) const {
    return (peer < 0 || peer == source) && header.tag == tag;
  }
  OpTag describing_tag() const {
    return peer_tag(is_send ? Op::send : Op::recv, header.bytes, peer, header.tag);
  }
  std::string describe() const {
    return "rank " + std::to_string(owner->mesh_.rank()) + ": " +
           pycomm::describe(describing_tag());
  }
  void expect(uint64_t bytes, int source) const {
    if (bytes == header.bytes) return;
    throw WireMismatch(describe() + " met a send of " + std::to_string(bytes) +
                       " bytes from rank " + std::to_string(source) +
                       "; both ends must name the same size");
  }

  const std::shared_ptr<PointToPoint> owner;
  const bool is_send;
  void* const data;
  const Header header;  // of a receive: what it expects
  const int peer;       // -1: any
  const Milliseconds limit;
  const uint64_t recording;  // number in the trace
  uint64_t ticket = 0;
  bool finished = false;
  int from = -1;
  std::exception_ptr error;
};

PointToPoint::PointToPoint(Mesh& mesh, Failure& failure, Trace& trace, std::function<void()> over)
    : mesh_(mesh), failure_(failure), trace_(trace), over_(std::move(over)), peers_(mesh.size()) {}

void PointToPoint::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  server_.notify_all();
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// ------------------------------------------------------------------ posting

std::shared_ptr<Communicator::Request> PointToPoint::send(const void* data, size_t bytes, int dst,
                                                          int tag, Milliseconds limit) {
  auto request = std::make_shared<Request>(shared_from_this(), true, const_cast<void*>(data), bytes,
                                           dst, tag, limit);
  Lock lock(mutex_);
  enter(lock);
  try {
    post_send(request);
    step();
  } catch (...) {
    over_();
  }
  wake_server();
  return request;
}

std::shared_ptr<Communicator::Request> PointToPoint::recv(void* data, size_t bytes, int src,
                                                          int tag, Milliseconds limit) {
  auto request = std::make_shared<Request>(shared_from_this(), false, data, bytes, src, tag, limit);
  Lock lock(mutex_);
  enter(lock);
  try {
    post_recv(request);
    step();
  } catch (...) {
    over_();
  }
  wake_server();
  return request;
}

// Waits until no thread sleeps on the mesh.
void PointToPoint::enter(Lock& lock) {
  failure_.rethrow();
  if (resting_) {
    entering_++;
    changed_.wait(lock, [this] { return !resting_; });
    if (--entering_ == 0) changed_.notify_all();
  }
}

void PointToPoint::post_send(const RequestPtr& request) {
  outstanding_++;
  const int dst = request->peer;
  if (dst == mesh_.rank()) {  // kept like a message that came early
    const auto match = std::find_if(posted_.begin(), posted_.end(), [&](const RequestPtr& posted) {
      return posted->matches(dst, request->header.tag);
    });
    const auto* from = static_cast<const uint8_t*>(request->data);
    if (match != posted_.end()) {
      const RequestPtr receiver = *match;
      receiver->expect(request->header.bytes, dst);
      posted_.erase(match);
      if (request->header.bytes > 0) std::memcpy(receiver->data, from, request->header.bytes);
      finish(receiver, dst);
    } else {
      unexpected_.push_back({dst, request->header.tag, {from, from + request->header.bytes}, true});
    }
    return finish(request, dst);
  }
  Peer& peer = peers_[dst];
  if (peer.lost) return finish(request, dst, peer.lost);
  if (std::find(active_.begin(), active_.end(), dst) == active_.end()) active_.push_back(dst);
  auto* header = const_cast<Header*>(&request->header);
  request->ticket = mesh_.send(kLane, dst, kTag, bytes_of(header, sizeof(Header)));
  if (request->header.bytes > 0) {
    request->ticket = mesh_.send(kLane, dst, kTag, bytes_of(request->data, request->header.bytes));
  }
  peer.sends.push_back(request);
}

void PointToPoint::post_recv(const RequestPtr& request) {
  outstanding_++;
  const auto match =
      std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& message) {
        return !message.claimed && request->matches(message.peer, message.tag);
      });
  if (match != unexpected_.end()) {
    request->expect(match->data.size(), match->peer);
    if (!match->complete) {
      match->claimed = request;
      return;
    }
    std::copy(match->data.begin(), match->data.end(), static_cast<uint8_t*>(request->data));
    const int source = match->peer;
    unexpected_.erase(match);
    return finish(request, source);
  }
  posted_.push_back(request);
  std::exception_ptr lost;
  bool somebody = false;
  for (int r = 0; r < mesh_.size(); r++) {
    if (request->peer >= 0 && request->peer != r) continue;
    if (r != mesh_.rank()) listen(r);
    if (peers_[r].lost) {
      lost = peers_[r].lost;
    } else {
      somebody = true;
    }
  }
  if (!somebody) {
    posted_.pop_back();
    finish(request, -1, lost);
  }
}

void PointToPoint::listen(int rank) {
  Peer& peer = peers_[rank];
  if (peer.listening || peer.lost) return;
  if (std::find(active_.begin(), active_.end(), rank) == active_.end()) active_.push_back(rank);
  peer.listening = true;
  peer.in_payload = false;
  peer.ticket = mesh_.recv(kLane, rank, kTag, bytes_of(&peer.header, sizeof(Header)));
}

// ------------------------------------------------------------------ moving bytes

bool PointToPoint::step() {
  bool moved = false;
  for (size_t i = 0; i < active_.size(); i++) {
    const int rank = active_[i];
    if (peers_[rank].lost) continue;
    try {
      moved |= mesh_.progress(kLane, rank);
      moved |= settle(rank);
    } catch (const PeerLost&) {
      lose(rank, std::current_exception());
    }
  }
  return moved;
}

// Notes what has been sent to and received from a peer.
bool PointToPoint::settle(int rank) {
  Peer& peer = peers_[rank];
  bool moved = false;
  while (!peer.sends.empty() && mesh_.sent(kLane, rank, peer.sends.front()->ticket)) {
    finish(peer.sends.front(), rank);
    peer.sends.pop_front();
    moved = true;
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
  peer.in_payload = true;
  uint8_t* place = nullptr;
  const auto match = std::find_if(posted_.begin(), posted_.end(), [&](const RequestPtr& request) {
    return request->matches(rank, header.tag);
  });
  if (match != posted_.end()) {
    (*match)->expect(header.bytes, rank);
    peer.target = *match;
    posted_.erase(match);
    place = static_cast<uint8_t*>(peer.target->data);
  } else {
    peer.unexpected = unexpected_.insert(unexpected_.end(),
                                         {rank, header.tag, std::vector<uint8_t>(header.bytes)});
    place = peer.unexpected->data.data();
  }
  if (header.bytes == 0) return on_payload(rank);
  peer.ticket = mesh_.recv(kLane, rank, kTag, {place, header.bytes});
}

void PointToPoint::on_payload(int rank) {
  Peer& peer = peers_[rank];
  if (peer.target) {
    finish(peer.target, rank);
    peer.target = nullptr;
  } else {
    Unexpected& message = *peer.unexpected;
    message.complete = true;
    if (message.claimed) {
      std::copy(message.data.begin(), message.data.end(),
                static_cast<uint8_t*>(message.claimed->data));
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
  outstanding_--;
  changed_.notify_all();
}

// A peer that has left is no error until somebody wants something from it.
void PointToPoint::lose(int rank, const std::exception_ptr& error) {
  Peer& peer = peers_[rank];
  if (peer.lost) return;
  peer.lost = error;
  peer.listening = false;
  for (const RequestPtr& request : peer.sends) finish(request, rank, error);
  peer.sends.clear();
  if (peer.target) finish(peer.target, rank, error);
  peer.target = nullptr;
  for (auto message = unexpected_.begin(); message != unexpected_.end();) {
    const bool broken = message->peer == rank && !message->complete;
    if (broken && message->claimed) finish(message->claimed, rank, error);
    message = broken ? unexpected_.erase(message) : std::next(message);
  }
  bool nobody = true;
  for (int r = 0; r < mesh_.size(); r++) nobody &= r == mesh_.rank() || peers_[r].lost;
  for (auto request = posted_.begin(); request != posted_.end();) {
    const bool hopeless = (*request)->peer == rank || ((*request)->peer < 0 && nobody);
    if (hopeless) finish(*request, rank, error);
    request = hopeless ? posted_.erase(request) : std::next(request);
  }
}

void PointToPoint::look_for_failures() {
  try {
    mesh_.check(kLane);
  } catch (const PeerLost& e) {
    if (e.rank < 0 || e.rank >= mesh_.size()) throw;
    lose(e.rank, std::current_exception());
  }
}

// ------------------------------------------------------------------ waiting

// Sleeps without the lock, then lets those in who want to post.
void PointToPoint::rest(Lock& lock, const std::function<void()>& how) {
  resting_ = true;
  lock.unlock();
  how();
  lock.lock();
  resting_ = false;
  changed_.notify_all();
  changed_.wait(lock, [this] { return entering_ == 0; });
}

void PointToPoint::wait(Request& request, Milliseconds limit) {
  Lock lock(mutex_);
  waiting_++;
  try {
    drive(lock, request, limit);
    waiting_--;
  } catch (...) {
    waiting_--;
    if (closed_) throw;  // there is no group any more
    over_();
  }
  wake_server();
}

// Moves bytes, or waits for the thread that does, until the request is done.
void PointToPoint::drive(Lock& lock, const Request& request, Milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  bool shown = false;
  for (int quiet = 0; !request.finished; quiet++) {
    if (closed_) throw Error(request.describe() + " was not done when its group was closed");
    failure_.rethrow();
    if (deadline.expired()) {
      throw Timeout(request.describe() + " did not end within the timeout of " +
                    std::to_string(limit.count()) + " ms; check that the other end " +
                    (request.is_send ? "receives" : "sends") + " with the same tag");
    }
    if (resting_) {
      changed_.wait_for(lock, std::min(deadline.left(), Milliseconds(10)));
    } else if (step()) {
      quiet = 0;
    } else if (!request.finished) {
      if (!shown) mesh_.standing().wait_for(request.describing_tag());
      shown = true;
      if (mesh_.should_check(quiet)) look_for_failures();
      rest(lock, [&] { mesh_.pause(kLane, quiet, deadline); });
    }
  }
  if (request.error) std::rethrow_exception(request.error);
  if (shown) mesh_.standing().wait_over();
}

void PointToPoint::wake_server() {
  if (outstanding_ == 0 || waiting_ > 0 || serving_ || closed_) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  server_.notify_one();
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
        if (step()) {
          quiet = 0;
          continue;
        }
        look_for_failures();
        const auto nap = quiet < kNapsBeforeLong ? kNap : kLongNap;
        rest(lock, [&] { mesh_.idle(kLane, nap); });
      }
    } catch (...) {
      try {
        over_();
      } catch (...) {  // the callers will see it
        changed_.notify_all();
      }
    }
  }
}

}  // namespace pycomm
