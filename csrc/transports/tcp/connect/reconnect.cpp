// Connector: reconnects cut connections, as long as the peer lives.
#include <unistd.h>

#include <algorithm>

#include "transports/tcp/connect/connector.h"
#include "transports/tcp/connect/control.h"

namespace pycomm::tcp {
namespace {

// A connection that has lasted this long is made again at once; after shorter ones we wait, longer
// each time.
constexpr auto kLasting = std::chrono::seconds(1);
constexpr auto kFirstPause = Milliseconds(20);
constexpr auto kLastPause = Milliseconds(100);

}  // namespace

Connector::SocketState& Connector::state_of(const LostConnection& broken) const {
  Link& wanted = link(broken.rank);
  if (broken.lane == kControl) return wanted.control_state;
  return wanted.lane_states[static_cast<size_t>(broken.lane)]
      .socket_states[static_cast<size_t>(broken.socket)];
}

void Connector::reopen(const LostConnection& broken) {
  {
    std::lock_guard<std::mutex> lock(requests_mutex_);
    lost_connections_.push_back(broken);
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

void Connector::reconnect() {
  std::vector<LostConnection> broken_ones;
  {
    std::lock_guard<std::mutex> lock(requests_mutex_);
    broken_ones.swap(lost_connections_);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const LostConnection& broken : broken_ones) reconnect(broken);
}

// Both ends may have noticed the cut, or one alone.
void Connector::reconnect(const LostConnection& broken) {
  if (broken.lane != kControl && broken.socket >= sockets(broken.rank, broken.lane)) return;
  SocketState& state = state_of(broken);
  if (!state.established || state.broken || state.generation != broken.generation) return;
  state.broken = true;
  Link& wanted = link(broken.rank);
  const auto lane = static_cast<uint16_t>(broken.lane);
  const auto now = Clock::now();
  state.pause = now - state.since >= kLasting
                    ? Milliseconds(0)
                    : std::clamp(2 * state.pause, kFirstPause, kLastPause);
  if (broken.rank < rank_) {
    Hello hello = hello_to(wanted, lane);
    hello.socket = static_cast<uint16_t>(broken.socket);
    hello.generation = broken.generation + 1;
    connect(wanted, hello, now + state.pause);
  } else if (lane == kControl) {
    Hello hello = hello_to(wanted, kCallBack);
    hello.generation = broken.generation;
    connect(wanted, hello, now);
  } else {
    control_->ask_to_connect(broken);
  }
}

// Requests that were sent while the control connection was cut are lost.
void Connector::ask_again(Link& link) {
  if (link.peer.rank < rank_) return;
  for (int lane = 0; lane < kLanes; lane++) {
    LaneState& lane_state = link.lane_states[static_cast<size_t>(lane)];
    if (lane_state.wanted && !lane_state.complete()) control_->ask_to_connect(link.peer.rank, lane);
    for (size_t socket = 0; socket < lane_state.socket_states.size(); socket++) {
      const SocketState& state = lane_state.socket_states[socket];
      if (!state.broken) continue;
      control_->ask_to_connect({link.peer.rank, lane, static_cast<int>(socket), state.generation});
    }
  }
}

}  // namespace pycomm::tcp
