// Control: which rank is named when one is gone.
#include <poll.h>

#include <algorithm>

#include "core/error.h"
#include "transports/tcp_control_parts.h"

namespace pycomm::tcp {

// A dead peer is no error yet for ranks that may be finishing without it.
constexpr auto kDeathGrace = std::chrono::milliseconds(50);
// Last words travel on another connection than the data whose end we saw.
constexpr auto kLastWords = std::chrono::milliseconds(50);

void Control::check() {
  poll();
  if (aborted()) throw_aborted();
  const bool deaths = std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    return peer->state.load(std::memory_order_acquire) == State::died;
  });
  if (!deaths) return;
  std::unique_lock<std::mutex> lock(mutex_);
  const Peer& first = *first_death();
  if (Clock::now() - first.died_at < kDeathGrace) return;
  lock.unlock();
  throw_died(first, "it closed its connections without a word");
}

// Under the mutex. Who gives up because of a death, before it is in the group as far as we are,
// seems to die, too; the first is the cause. Null: nobody has died.
Control::Peer* Control::first_death() const {
  Peer* first = nullptr;
  for (const auto& peer : peers_) {
    if (peer->state != State::died) continue;
    if (first == nullptr || peer->cut_at < first->cut_at) first = peer.get();
  }
  return first;
}

void Control::throw_aborted() const { throw Error(abort_text_); }

void Control::throw_died(const Peer& peer, const std::string& how) const {
  throw PeerLost(peer.rank, "rank " + std::to_string(peer.rank) + " (" + peer.address.text() +
                                ") died: " + how);
}

void Control::throw_lost(int rank, const std::string& what) {
  Peer& peer = *find(rank);
  const auto end = Clock::now() + kLastWords;
  for (;;) {
    pollfd wait = {-1, POLLIN, 0};
    poll();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (aborted()) throw_aborted();
      // It may have gone because of another, of which we do not know yet whether it is dead.
      const bool known = gone(rank) && !cut_off();
      if (known || Clock::now() >= end) break;
      wait.fd = peer.wire.get();  // or none
    }
    ::poll(&wait, 1, 5);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const Peer* const dead = first_death();
  const bool left = peer.state == State::left;
  lock.unlock();
  if (dead != nullptr && dead != &peer) {
    throw_died(*dead, "and rank " + std::to_string(rank) + (left ? " left" : " is gone, too"));
  }
  if (!left) throw_died(peer, what);
  throw PeerLost(rank, "rank " + std::to_string(rank) + " (" + peer.address.text() +
                           ") has left the group: " + what);
}

}  // namespace pycomm::tcp
