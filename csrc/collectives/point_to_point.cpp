// Matching: what is posted, what arrives, and how the two meet.
#include <algorithm>
#include <cstring>

#include "collectives/point_to_point_request.h"

namespace pycomm {
namespace {

// Longer messages are offered first: a round trip more is little beside their bytes.
constexpr uint64_t kEagerBytes = 64 << 10;
// What a rank keeps of one peer at most, and what a message costs beside its bytes.
constexpr uint64_t kKeptBytes = 1 << 20;
constexpr uint64_t kMessageCost = 128;

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

PointToPoint::PointToPoint(Mesh& mesh, Failure& failure, Trace& trace, std::function<void()> over)
    : mesh_(mesh),
      rank_(mesh.rank()),
      failure_(failure),
      trace_(trace),
      over_(std::move(over)),
      peers_(mesh.size()) {}

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
  try {
    enter(lock);
    post_send(request);
    step();
  } catch (...) {
    end_in(*request);
  }
  wake_server();
  return request;
}

std::shared_ptr<Communicator::Request> PointToPoint::recv(void* data, size_t bytes, int src,
                                                          int tag, Milliseconds limit) {
  auto request = std::make_shared<Request>(shared_from_this(), false, data, bytes, src, tag, limit);
  Lock lock(mutex_);
  try {
    enter(lock);
    post_recv(request);
    step();
  } catch (...) {
    end_in(*request);
  }
  wake_server();
  return request;
}

// The group is over, and the texts that say so tell what we were doing.
void PointToPoint::end_in(const Request& request) {
  const OpTag tag = request.describing_tag();
  mesh_.standing().wait_for(tag);
  over_();
  failure_.rethrow_in(tag, rank_);
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
  if (dst == rank_) {  // kept like a message that came early
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
  // Its place may be ready before the offer has left, so the header is not the request's own.
  send_note(dst, {request->bytes, request->tag, 0, Kind::offer});
  peer.offered.push_back(request);
  listen(dst);
}

void PointToPoint::send_bytes(const RequestPtr& request, Kind kind, uint64_t place) {
  request->header = {request->bytes, request->tag, place, kind};
  const int dst = request->peer;
  request->ticket = mesh_.send(kLane, dst, kTag, bytes_of(&request->header, sizeof(Header)));
  if (request->bytes > 0) {
    request->ticket = mesh_.send(kLane, dst, kTag, bytes_of(request->data, request->bytes));
  }
  peers_[dst].sends.push_back(request);
}

void PointToPoint::send_note(int peer, const Header& header) {
  auto& notes = peers_[peer].notes;  // a deque: what it holds stays in place
  notes.push_back({header});
  Note& note = notes.back();
  note.ticket = mesh_.send(kLane, peer, kTag, bytes_of(&note.header, sizeof(Header)));
}

void PointToPoint::make_ready(int rank, const RequestPtr& request) {
  Peer& peer = peers_[rank];
  request->ready = true;
  peer.places[++peer.last_place] = request;
  send_note(rank, {request->bytes, request->tag, peer.last_place, Kind::ready});
}

// Seldom, since a note costs as much as a short message.
void PointToPoint::give_credit(int rank, uint64_t bytes) {
  if (rank == rank_) return;
  Peer& peer = peers_[rank];
  peer.credit += bytes + kMessageCost;
  if (peer.credit < kKeptBytes / 2 || peer.lost) return;
  send_note(rank, {peer.credit, 0, 0, Kind::credit});
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
    if (request->peer >= 0 && request->peer != r) continue;
    if (r != rank_) listen(r);
    if (peers_[r].lost) {
      lost = peers_[r].lost;
    } else {
      somebody = true;
    }
  }
  if (!somebody) {
    posted_.pop_back();
    return finish(request, -1, lost);
  }
  // Those before it that take messages of any rank come first.
  const bool first = std::none_of(posted_.begin(), posted_.end(), [&](const RequestPtr& posted) {
    return posted->peer < 0 && posted->tag == request->tag;
  });
  if (request->bytes > kEagerBytes && request->peer != rank_ && first) {
    make_ready(request->peer, request);
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
    std::exception_ptr lost;
    try {
      moved |= mesh_.progress(kLane, rank);
    } catch (const PeerLost&) {
      lost = std::current_exception();
    }
    try {
      if (settle(rank)) {  // it may have left because it has all it wanted
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

// Notes what has been sent to and received from a peer.
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
  if (header.kind == Kind::eager || header.kind == Kind::offer) return on_message(rank);
  if (header.kind == Kind::payload) {
    const auto place = peer.places.find(header.place);
    if (place == peer.places.end() || place->second->bytes != header.bytes) {
      throw Error("rank " + std::to_string(rank_) + ": rank " + std::to_string(rank) +
                  " sends bytes for which there is no place; install the same pycomm");
    }
    peer.target = place->second;
    peer.places.erase(place);
    posted_.remove(peer.target);
    peer.in_payload = true;
    peer.ticket = mesh_.recv(kLane, rank, kTag, bytes_of(peer.target->data, header.bytes));
    return;
  }
  if (header.kind == Kind::ready) {
    on_ready(rank);
  } else {
    peer.eager_bytes -= std::min(header.bytes, peer.eager_bytes);
  }
  peer.listening = false;
  listen(rank);
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

// An offer, or a message whose bytes follow.
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
  peer.ticket = mesh_.recv(kLane, rank, kTag, bytes_of(place, header.bytes));
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
    for (const int peer : mesh_.lost_ones(kLane)) lose(peer, std::current_exception());
  }
}

}  // namespace pycomm
