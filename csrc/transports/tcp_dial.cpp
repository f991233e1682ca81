// Connector: whom we call, again and again until the connection stands.
#include <algorithm>
#include <cerrno>

#include "core/error.h"
#include "transports/tcp_connector_parts.h"
#include "transports/tcp_control.h"

namespace pycomm::tcp {

// How long the network may take for a connection before we try another way.
constexpr auto kConnectLimit = std::chrono::seconds(3);
constexpr auto kLastRetry = Milliseconds(1000);

Hello Connector::hello_to(const Link& link, uint16_t lane) const {
  Hello hello;
  hello.size = static_cast<uint32_t>(size_);
  hello.rank = static_cast<uint32_t>(rank_);
  hello.target = static_cast<uint32_t>(link.peer.rank);
  hello.sockets = static_cast<uint16_t>(mesh_.sockets);
  hello.lane = lane;
  hello.tls = mesh_.tls;
  return hello;
}

void Connector::connect(Link& link, uint16_t lane) {
  Hello hello = hello_to(link, lane);
  const int count = lane == kControl ? 1 : mesh_.sockets;
  for (int i = 0; i < count; i++) {
    hello.socket = static_cast<uint16_t>(i);
    connect(link, hello, Clock::now());
  }
}

void Connector::connect(Link& link, const Hello& hello, Clock::time_point when) {
  outgoing_.emplace_back();
  outgoing_.back().link = &link;
  outgoing_.back().hello = hello;
  outgoing_.back().way = hello.socket;
  outgoing_.back().wake = when;
}

void Connector::serve(Outgoing& out) {
  const Peer& peer = out.link->peer;
  int error = 0;
  if (out.hello.lane == kCallBack && !out.link->control_place.broken) {
    out.over = true;
    return;
  }
  if (!out.fd) {
    if (Clock::now() < out.wake) return;
    // The sockets go round the interfaces: our i-th to the peer's i-th. The route decides by which
    // interface we leave, unless the user has.
    const size_t pairs = std::min(mesh_.interfaces.size(), peer.addresses.size());
    const size_t pair = out.way % pairs;
    const Address* from = mesh_.bound ? &mesh_.interfaces[pair].address : nullptr;
    out.fd = connect_to(peer.addresses[pair], from, error);
    out.wake = Clock::now() + kConnectLimit;
    if (error != 0) retry(out, error);
    return;
  }
  if (!out.ready) {
    if (Clock::now() >= out.wake) retry(out, ETIMEDOUT);
    return;
  }
  if (!out.greeting) {
    error = pending_error(out.fd.get());
    if (error != 0) return retry(out, error);
    out.greeting.emplace(Handshake(peer.secret, group_, out.hello));
    out.wake = Clock::time_point::max();
  }
  switch (out.greeting->advance(out.fd.get(), error)) {
    case Greeting::Progress::waits:
      return;
    case Greeting::Progress::closed:
      return retry(out, error);
    case Greeting::Progress::refused:
      // Of one that has been in the group before: somebody else has its port now.
      if (out.hello.generation > 0 || out.hello.lane == kCallBack) return give_up(out);
      throw Error("tcp: rank " + std::to_string(rank_) + " cannot join: " + name_of(*out.link) +
                  ": " + out.greeting->problem());
    case Greeting::Progress::done:
      if (out.hello.lane == kCallBack) return retry(out, 0);  // until its call comes
      join(*out.link, out.hello, out.greeting->wire(std::move(out.fd)));
      out.over = true;
  }
}

// A full queue, a router that wakes up, a listener that was flooded: such things pass. A closed
// port does not, since the address was published after the port was open.
void Connector::retry(Outgoing& out, int error) {
  const std::string how = error == EPROTO && out.greeting ? "TLS: " + out.greeting->problem()
                          : error == 0 ? "it closed the connection during the handshake"
                                       : error_text(error);
  last_error_ = name_of(*out.link) + ": " + how;
  if (error == ECONNREFUSED) give_up(out);
  out.fd.reset();
  out.ready = false;
  out.greeting.reset();
  out.way++;
  out.wake = Clock::now() + out.pause;
  out.pause = std::min(out.pause * 2, kLastRetry);
}

// Its listener is gone, and so is its process.
void Connector::give_up(Outgoing& out) {
  out.link->obstacle = last_error_ + "; it died or gave up, or a firewall stands between";
  out.over = true;
  troubled_ = true;
  if (control_ != nullptr) control_->refused(out.link->peer.rank);
}

}  // namespace pycomm::tcp
