// Channel over several sockets with work stealing: whichever socket can be written takes the next
// frame of the oldest message that has bytes left (tcp/channel_send.cpp).
//
// Frames leave in the order of messages, so on every socket the message numbers ascend. A frame
// whose receive is not posted yet stops only its own socket, and the frames that precede it in
// order are never behind it, so there is no deadlock (tcp/channel_receive.cpp).
#include "transports/tcp/channel.h"

#include <sys/socket.h>

#include "transports/tcp/channel_socket.h"

namespace pycomm::tcp {

TcpChannel::TcpChannel(int peer, Connector& connector, Poller& poller, bool checks_payload)
    : peer_(peer), connector_(connector), poller_(poller), checks_payload_(checks_payload) {}

TcpChannel::~TcpChannel() = default;

uint64_t TcpChannel::send(const OpTag& tag, Span<const uint8_t> data) {
  Outgoing message;
  message.tag = tag;
  message.tag_hash = tag.hash();
  message.data = data;
  std::lock_guard<std::mutex> lock(poller_.mutex());
  if (outgoing_.empty()) flow_.begin(Flow::Clock::now());
  outgoing_.push_back(message);
  const uint64_t ticket = sent_ + outgoing_.size();
  if (sockets_.empty() && !opening_ && !connected()) {
    opening_ = true;
    connector_.open(peer_, poller_.lane());
  }
  if (cutting_ + 1 == outgoing_.size()) {
    for (auto& socket : sockets_) push(*socket);
  }
  return ticket;
}

uint64_t TcpChannel::recv(const OpTag& tag, Span<uint8_t> data) {
  Incoming message;
  message.tag = tag;
  message.tag_hash = tag.hash();
  message.data = data;
  std::lock_guard<std::mutex> lock(poller_.mutex());
  incoming_.push_back(message);
  return received_ + incoming_.size();
}

bool TcpChannel::progress() {
  if (poller_.control().aborted()) poller_.control().check();
  std::lock_guard<std::mutex> lock(poller_.mutex());
  if (outgoing_.empty() && incoming_.empty()) return false;
  if (sockets_.empty() && !connected()) return false;
  if (connector_.fresh(peer_, poller_.lane())) adopt_connections();
  bool moved = advance();
  if (!moved) {
    if (poller_.polls() == polls_seen_) {
      poller_.poll();
      moved = advance();
    }
    polls_seen_ = poller_.polls();
  }
  if (moved) stalled_since_ = {};
  if (moved || release_buffers()) return true;
  if (cuts_ > 0) check_for_loss();
  if (!incoming_.empty()) poller_.expect(incoming_.front().data.size - incoming_.front().read);
  if (!outgoing_.empty()) poller_.expect(outgoing_.front().data.size - outgoing_.front().cut);
  return false;
}

// Takes the sockets as soon as they are connected. Returns true once it has them.
bool TcpChannel::connected() {
  const int lane = poller_.lane();
  if (!connector_.ready(peer_, lane)) {
    const bool gone = poller_.control().gone(peer_);
    if (!gone && !connector_.has_errors()) return false;
    const std::string connection_error = connector_.connection_error(peer_, lane, gone);
    if (!connection_error.empty()) throw_lost(connection_error);
    if (!connector_.ready(peer_, lane)) return false;
  }
  cuts_ = connector_.sockets(peer_, lane);
  for (int number = 0; number < cuts_; number++) {
    sockets_.push_back(std::make_unique<Socket>());
    sockets_.back()->number = number;
  }
  adopt_connections();
  return true;
}

// Of two sockets or less none is too many, and of several paths each has its own. What a user has
// asked for is kept.
void TcpChannel::choose_sockets() {
  const PeerDirectory& directory = connector_.directory();
  if (sockets_.size() <= 2 || directory.options.sockets > 0 || directory.paths() > 1) return;
  const auto now = Flow::Clock::now();
  if (!flow_.is_due(now)) return;
  SocketUse use;
  for (const auto& socket : sockets_) add_use(socket->sock.get(), use);
  flow_.update(now, use);
  const double limit = flow_.limit(sockets_.size());
  for (auto& socket : sockets_) {
    if (socket->limit != limit && socket->sock) limit_rate(socket->sock.get(), limit);
    socket->limit = limit;
  }
}

// All sockets serve while one of them has no connection.
bool TcpChannel::takes_frames(const Socket& socket) const {
  return cuts_ > 0 || static_cast<size_t>(socket.number) < flow_.sockets(sockets_.size());
}

bool TcpChannel::advance() {
  choose_sockets();
  bool moved = false;
  for (auto& socket : sockets_) {
    if (socket->greeting && !greet(*socket)) continue;
    moved |= pull(*socket);
    moved |= push(*socket);
  }
  return moved;
}

// ------------------------------------------------------------------------------ the end

void TcpChannel::finish() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  for (auto& socket : sockets_) {
    if (socket->sock) ::shutdown(socket->sock.get(), SHUT_WR);
  }
}

LinkUse TcpChannel::use() const {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  LinkUse sum;
  for (const auto& socket : sockets_) {
    const LinkUse use = link_use(socket->sock.get());
    sum.bytes += use.bytes;
    sum.busy_us += use.busy_us;
    sum.unsent += use.unsent;
    sum.round_trip_us = std::max(sum.round_trip_us, use.round_trip_us);
  }
  // The sockets are busy at the same time, each with its part.
  if (!sockets_.empty()) sum.busy_us /= sockets_.size();
  return sum;
}

size_t TcpChannel::unacknowledged() {
  std::lock_guard<std::mutex> lock(poller_.mutex());
  size_t bytes = 0;
  for (const auto& socket : sockets_) bytes += tcp::unacknowledged(socket->sock.get());
  return bytes;
}

void TcpChannel::throw_damaged(const std::string& how) const {
  const OpTag tag = !incoming_.empty()   ? incoming_.front().tag
                    : !outgoing_.empty() ? outgoing_.front().tag
                                         : OpTag();
  throw Error("tcp: rank " + std::to_string(poller_.rank()) + " received damaged data from rank " +
              std::to_string(peer_) + " for " + describe(tag) + ": " + how +
              "; look for damaged memory or network hardware between the two");
}

void TcpChannel::throw_lost(const std::string& how) const {
  const bool receiving = !incoming_.empty();
  const OpTag& tag = receiving ? incoming_.front().tag : outgoing_.front().tag;
  poller_.control().throw_lost(peer_, how + " while rank " + std::to_string(poller_.rank()) +
                                          (receiving ? " waits for " : " sends ") + describe(tag));
}

}  // namespace pycomm::tcp
