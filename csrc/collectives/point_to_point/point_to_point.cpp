// Posted requests: they are matched with what has arrived, or wait for it.
#include <algorithm>
#include <cstring>

#include "collectives/point_to_point/request.h"

namespace pycomm {

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
  // Receives that were posted before it and match messages of any rank come first.
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
  peer.ticket = mesh_.recv(kLane, rank, kLaneTag, bytes_of(&peer.header, sizeof(Header)));
}

}  // namespace pycomm
