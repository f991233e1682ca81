// Incoming messages: they are matched with posted receives, or kept until one is posted.
#include <algorithm>

#include "collectives/point_to_point/request.h"

namespace pycomm {

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

}  // namespace pycomm
