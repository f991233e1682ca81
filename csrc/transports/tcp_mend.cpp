// Connector: connections that were cut are made again, as long as the peer lives.
#include <unistd.h>

#include <algorithm>

#include "transports/tcp_connector.h"
#include "transports/tcp_control.h"

namespace pycomm::tcp {
namespace {

// A connection that has lasted so long is made again at once; after shorter ones we wait, longer
// each time.
constexpr auto kLasting = std::chrono::seconds(1);
constexpr auto kFirstPause = Milliseconds(20);
constexpr auto kLastPause = Milliseconds(100);

}  // namespace

Connector::Place& Connector::place(const Broken& broken) const {
  Link& wanted = link(broken.rank);
  if (broken.lane == kControl) return wanted.control_place;
  return wanted.ways[static_cast<size_t>(broken.lane)].places[static_cast<size_t>(broken.socket)];
}

void Connector::reopen(const Broken& broken) {
  {
    std::lock_guard<std::mutex> lock(wishes_mutex_);
    broken_ones_.push_back(broken);
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

void Connector::mend() {
  std::vector<Broken> broken_ones;
  {
    std::lock_guard<std::mutex> lock(wishes_mutex_);
    broken_ones.swap(broken_ones_);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Broken& broken : broken_ones) mend(broken);
}

// Both ends may have seen it, or one alone.
void Connector::mend(const Broken& broken) {
  if (broken.lane != kControl && broken.socket >= mesh_.sockets) return;
  Place& place = this->place(broken);
  if (!place.stood || place.broken || place.generation != broken.generation) return;
  place.broken = true;
  Link& wanted = link(broken.rank);
  const auto lane = static_cast<uint16_t>(broken.lane);
  const auto now = Clock::now();
  place.pause = now - place.since >= kLasting
                    ? Milliseconds(0)
                    : std::clamp(2 * place.pause, kFirstPause, kLastPause);
  if (broken.rank < rank_) {
    Hello hello = hello_to(wanted, lane);
    hello.socket = static_cast<uint16_t>(broken.socket);
    hello.generation = broken.generation + 1;
    connect(wanted, hello, now + place.pause);
  } else if (lane == kControl) {
    Hello hello = hello_to(wanted, kCallBack);
    hello.generation = broken.generation;
    connect(wanted, hello, now);
  } else {
    control_->ask_to_connect(broken);
  }
}

// What we asked for while the control connection was cut is lost.
void Connector::ask_again(Link& link) {
  if (link.peer.rank < rank_) return;
  for (int lane = 0; lane < kLanes; lane++) {
    Way& way = link.ways[static_cast<size_t>(lane)];
    if (way.wanted && way.missing > 0) control_->ask_to_connect(link.peer.rank, lane);
    for (size_t socket = 0; socket < way.places.size(); socket++) {
      const Place& place = way.places[socket];
      if (!place.broken) continue;
      control_->ask_to_connect({link.peer.rank, lane, static_cast<int>(socket), place.generation});
    }
  }
}

}  // namespace pycomm::tcp
