#include "collectives/mesh.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace pycomm {
namespace {

// A sleep ends early when bytes come; its limit bounds how late an abort from another thread is
// seen.
constexpr std::chrono::microseconds kNap{2000};
// Where two kinds of transport are waited for, only one can be slept on. The other is looked at
// after 50 us, then ever more seldom.
constexpr std::chrono::microseconds kShortNap{50};
constexpr int kNapDoublings = 4;
// Looks between two searches for failures: one costs as much as several looks.
constexpr int kLooksPerCheck = 64;
// About a second, on whatever clock: one look costs a microsecond for each socket.
constexpr uint64_t kTicksBetweenLinks = 2'000'000'000;
// How long an error may wait for what other ranks are doing. Those that wait answer within a few
// milliseconds; those that compute do not.
constexpr Milliseconds kSurvey{200};
constexpr Milliseconds kSurveyStep{2};

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

std::string Mesh::describe() const {
  std::string text = size_ == 1 ? "1 rank" : std::to_string(size_) + " ranks";
  for (size_t i = 0; i < transports_.size(); i++) {
    text += (i == 0 ? ": " : "; ") + transports_[i]->describe();
  }
  return text;
}

std::shared_ptr<SharedHeap> Mesh::heap() const {
  for (const auto& transport : transports_) {
    if (auto heap = transport->heap()) return heap;
  }
  return nullptr;
}

uint64_t Mesh::sent_bytes() const {
  uint64_t sum = 0;
  for (const auto& transport : transports_) sum += transport->sent_bytes();
  return sum;
}

uint64_t Mesh::wire_bytes() const {
  uint64_t sum = 0;
  for (const auto& transport : transports_) {
    if (transport->name() == "tcp") sum += transport->sent_bytes();
  }
  return sum;
}

Channel& Mesh::open(Lane lane, int peer) {
  Link& l = link(lane, peer);
  if (!l.channel) {
    std::lock_guard<std::mutex> lock(opening_);
    l.channel = &by_rank_[peer]->channel(peer, lane);
    opened_[static_cast<int>(lane)].push_back(peer);
  }
  return *l.channel;
}

uint64_t Mesh::send(Lane lane, int peer, const OpTag& tag, Span<const uint8_t> data) {
  Channel& channel = open(lane, peer);
  return link(lane, peer).last_send = channel.send(tag, data);
}

uint64_t Mesh::recv(Lane lane, int peer, const OpTag& tag, Span<uint8_t> data) {
  Channel& channel = open(lane, peer);
  return link(lane, peer).last_recv = channel.recv(tag, data);
}

bool Mesh::progress(Lane lane, int peer) {
  const Link& l = link(lane, peer);
  if (!l.pending() || !l.channel->progress()) return false;
  naps_[static_cast<int>(lane)] = 0;
  moved_last_[static_cast<int>(lane)] = peer;
  return true;
}

bool Mesh::progress(Lane lane) {
  bool moved = false;
  for (const int peer : opened_[static_cast<int>(lane)]) moved |= progress(lane, peer);
  return moved;
}

bool Mesh::pending(Lane lane) {
  const std::vector<int>& peers = opened_[static_cast<int>(lane)];
  return std::any_of(peers.begin(), peers.end(), [&](int peer) { return pending(lane, peer); });
}

void Mesh::check(Lane lane) {
  failure_.rethrow();
  for (const auto& transport : transports_) {
    try {
      transport->check();
    } catch (const PeerLost& e) {
      if (e.rank < 0 || e.rank >= size_ || pending(lane, e.rank)) throw;
      if (!lost_ones(lane).empty()) throw;
    }
  }
}

std::vector<int> Mesh::lost_ones(Lane lane) {
  std::vector<int> ranks;
  for (const int peer : opened_[static_cast<int>(lane)]) {
    if (pending(lane, peer) && lost(peer)) ranks.push_back(peer);
  }
  return ranks;
}

void Mesh::idle(Lane lane, std::chrono::microseconds limit) {
  if (transports_.empty()) return;
  Transport* wanted = nullptr;
  bool both = false;
  for (const int peer : opened_[static_cast<int>(lane)]) {
    if (!pending(lane, peer)) continue;
    both = both || (wanted && wanted != by_rank_[peer]);
    wanted = by_rank_[peer];
  }
  int& naps = naps_[static_cast<int>(lane)];
  if (!both) {
    naps = 0;
    return (wanted ? wanted : transports_.back().get())->idle(lane, limit);
  }
  // The last one is TCP, where looking costs a system call.
  transports_.back()->idle(lane, std::min(limit, kShortNap * (1 << std::min(naps, kNapDoublings))));
  naps++;
}

bool Mesh::should_check(int quiet) const {
  return quiet >= spins_ + yields_ || quiet % kLooksPerCheck == kLooksPerCheck - 1;
}

void Mesh::pause(Lane lane, int quiet, const Deadline& deadline) {
  if (quiet < spins_) {
    pause_cpu();
  } else if (quiet < spins_ + yields_) {
    sched_yield();
  } else {
    idle(lane, std::min<std::chrono::microseconds>(kNap, deadline.left()));
  }
}

void Mesh::note_links(Trace& trace) {
  if (slowest_ != Medium::tcp) return;
  const uint64_t now = ticks();
  if (now - links_noted_ < kTicksBetweenLinks) return;
  links_noted_ = now;
  for (const int peer : opened_[static_cast<int>(Lane::collective)]) {
    trace.note_link(peer, link(Lane::collective, peer).channel->use());
  }
}

void Mesh::begin(const OpTag& tag) {
  standing_->begin(tag);
  for (const int peer : opened_[static_cast<int>(Lane::collective)]) {
    Link& l = link(Lane::collective, peer);
    if (l.received() > l.began) l.heard = running_;
    l.began = l.received();
  }
  running_ = tag;
}

std::vector<int> Mesh::missing(int source) {
  std::vector<int> silent, slow, full;
  for (const int peer : opened_[static_cast<int>(Lane::collective)]) {
    const Link& l = link(Lane::collective, peer);
    if (l.last_recv > l.received()) {
      (l.received() == l.began ? silent : slow).push_back(peer);
    } else if (l.pending()) {
      full.push_back(peer);
    }
  }
  if (std::count(silent.begin(), silent.end(), source)) return {source};
  return !silent.empty() ? silent : !slow.empty() ? slow : full;
}

Sighting Mesh::look(Lane lane, int rank) {
  if (rank == rank_) return {Sighting::Presence::here, standing_->load()};
  Sighting sighting = by_rank_[rank]->look(rank);
  if (sighting.presence == Sighting::Presence::silent && lane == Lane::collective) {
    const Link& l = link(lane, rank);
    sighting.standing = Standing();
    sighting.standing.call = l.received() > l.began ? running_ : l.heard;
  }
  return sighting;
}

std::vector<Sighting> Mesh::survey(Lane lane, uint64_t all_inside) {
  using Presence = Sighting::Presence;
  for (const auto& transport : transports_) transport->ask();
  const Deadline deadline = Deadline::after(kSurvey);
  std::vector<Sighting> ranks(size_);
  for (;;) {
    for (int r = 0; r < size_; r++) ranks[r] = look(lane, r);
    const bool settled = std::all_of(ranks.begin(), ranks.end(), [&](const Sighting& s) {
      return s.presence == Presence::here ? s.standing.call.seq >= all_inside
                                          : s.presence != Presence::silent;
    });
    if (settled || deadline.expired() || aborted()) return ranks;
    std::this_thread::sleep_for(kSurveyStep);
    // What they were doing when they answered may be over.
    if (all_inside > 0) {
      for (const auto& transport : transports_) transport->ask();
    }
  }
}

std::exception_ptr Mesh::aborted() const {
  for (const auto& transport : transports_) {
    try {
      transport->check();
    } catch (const PeerLost&) {
      continue;
    } catch (const Error&) {
      return from_reason(std::current_exception());
    }
  }
  return nullptr;
}

bool Mesh::lost(int rank) const {
  Transport* transport = by_rank_[rank];
  return transport && transport->look(rank).presence == Sighting::Presence::died;
}

void Mesh::abort(const std::string& reason) noexcept {
  for (const auto& transport : transports_) transport->abort(reason);
}

}  // namespace pycomm
