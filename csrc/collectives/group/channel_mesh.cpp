#include "collectives/group/channel_mesh.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace pycomm {
namespace {

// A sleep ends early when bytes arrive; this limit bounds how late an abort from another thread is
// seen.
constexpr std::chrono::microseconds kIdleLimit{2000};
// Where a wait involves two kinds of transport, only one can be slept on. The other is polled after
// 50 us, then at growing intervals.
constexpr std::chrono::microseconds kShortIdle{50};
constexpr int kIdleDoublings = 4;
// Steps of a spin between two checks for failures: one check costs as much as several polls.
constexpr int kPollsPerCheck = 64;
// About a second, on whatever clock: one update costs a microsecond for each socket.
constexpr uint64_t kTicksBetweenLinks = 2'000'000'000;
// Limit of the time that an error waits for the states of other ranks. Ranks that wait answer
// within a few milliseconds and a round trip; ranks that compute do not.
constexpr Milliseconds kSurvey{200};
constexpr Milliseconds kSurveyStep{2};

}  // namespace

std::string ChannelMesh::describe() const {
  std::string text = size_ == 1 ? "1 rank" : std::to_string(size_) + " ranks";
  for (size_t i = 0; i < transports_.size(); i++) {
    text += (i == 0 ? ": " : "; ") + transports_[i]->describe();
  }
  std::lock_guard<std::mutex> lock(learning_);
  const std::string links = links_between_.describe();
  if (!links.empty()) text += "; " + links;
  if (!has_sites_) return text;
  text += "; " + std::to_string(topology_.nodes()) + " sites: ";
  for (int k = 0; k < topology_.nodes(); k++) {
    for (const int rank : topology_.node(k)) {
      text +=
          (rank == topology_.node(k).front() ? k == 0 ? "" : " | " : ",") + std::to_string(rank);
    }
  }
  return text;
}

std::vector<std::string> ChannelMesh::transports() const {
  std::vector<std::string> names;
  for (const auto& transport : transports_) names.emplace_back(transport->name());
  return names;
}

void ChannelMesh::use_sites(const std::vector<int>& first) {
  const Topology sites(first);
  if (sites.ranks() == size_ && sites.nodes() > 1 && sites.nodes() < topology_.nodes()) {
    has_sites_ = true;
    topology_ = sites;
  }
}

uint32_t ChannelMesh::round_trip(int rank) const {
  const Transport* transport = by_rank_[rank];
  return transport ? static_cast<uint32_t>(transport->round_trip(rank).count()) : 0;
}

void ChannelMesh::set_round_trips(std::vector<uint32_t> round_trips) {
  std::lock_guard<std::mutex> lock(learning_);
  links_between_.set_round_trips(std::move(round_trips));
  use_sites(links_between_.sites());
}

std::string ChannelMesh::take_back_heap() noexcept {
  const auto heap = this->heap();
  if (!window_ || !heap) return "";
  const std::string problem = heap->take_back(window_->written_late());
  if (problem.empty()) return "";
  return "; the memory of Communicator.allocate could not be taken from the other ranks (" +
         problem + "): one that was stopped may still write to the buffer of this call";
}

uint64_t ChannelMesh::sent_bytes() const {
  uint64_t sum = 0;
  for (const auto& transport : transports_) sum += transport->sent_bytes();
  return sum;
}

uint64_t ChannelMesh::wire_bytes() const {
  uint64_t sum = 0;
  for (const auto& transport : transports_) {
    if (transport->name() == "tcp") sum += transport->sent_bytes();
  }
  return sum;
}

Channel& ChannelMesh::open(Lane lane, int peer) {
  Link& l = link(lane, peer);
  if (!l.channel) {
    std::lock_guard<std::mutex> lock(opening_);
    l.channel = &by_rank_[peer]->channel(peer, lane);
    opened_[static_cast<int>(lane)].push_back(peer);
  }
  return *l.channel;
}

uint64_t ChannelMesh::send(Lane lane, int peer, const OpTag& tag, Span<const uint8_t> data) {
  Channel& channel = open(lane, peer);
  return link(lane, peer).last_send = channel.send(tag, data);
}

uint64_t ChannelMesh::recv(Lane lane, int peer, const OpTag& tag, Span<uint8_t> data) {
  Channel& channel = open(lane, peer);
  return link(lane, peer).last_recv = channel.recv(tag, data);
}

bool ChannelMesh::progress(Lane lane, int peer) {
  const Link& l = link(lane, peer);
  if (!l.pending() || !l.channel->progress()) return false;
  idles_[static_cast<int>(lane)] = 0;
  return true;
}

bool ChannelMesh::progress(Lane lane) {
  bool moved = false;
  for (const int peer : opened_[static_cast<int>(lane)]) moved |= progress(lane, peer);
  return moved;
}

bool ChannelMesh::pending(Lane lane) {
  const std::vector<int>& peers = opened_[static_cast<int>(lane)];
  return std::any_of(peers.begin(), peers.end(), [&](int peer) { return pending(lane, peer); });
}

void ChannelMesh::check(Lane lane) {
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

std::vector<int> ChannelMesh::lost_ones(Lane lane) {
  std::vector<int> ranks;
  for (const int peer : opened_[static_cast<int>(lane)]) {
    if (pending(lane, peer) && lost(peer)) ranks.push_back(peer);
  }
  return ranks;
}

void ChannelMesh::idle(Lane lane, std::chrono::microseconds limit) {
  if (transports_.empty()) return;
  Transport* wanted = nullptr;
  bool both = false;
  for (const int peer : opened_[static_cast<int>(lane)]) {
    if (!pending(lane, peer)) continue;
    both = both || (wanted && wanted != by_rank_[peer]);
    wanted = by_rank_[peer];
  }
  int& idles = idles_[static_cast<int>(lane)];
  if (!both) {
    idles = 0;
    return (wanted ? wanted : transports_.back().get())->idle(lane, limit);
  }
  // The last one is TCP, where polling costs a system call.
  transports_.back()->idle(lane,
                           std::min(limit, kShortIdle * (1 << std::min(idles, kIdleDoublings))));
  idles++;
}

bool ChannelMesh::should_check(int quiet) const {
  return quiet >= yields_ || quiet % kPollsPerCheck == kPollsPerCheck - 1;
}

void ChannelMesh::pause(Lane lane, int quiet, const Deadline& deadline) {
  if (quiet < yields_) {
    sched_yield();
  } else {
    idle(lane, std::min<std::chrono::microseconds>(kIdleLimit, deadline.left()));
  }
}

void ChannelMesh::note_links(Trace& trace) {
  if (slowest_ != Medium::tcp) return;
  const uint64_t now = ticks();
  if (now - links_noted_ < kTicksBetweenLinks) return;
  links_noted_ = now;
  for (const int peer : opened_[static_cast<int>(Lane::collective)]) {
    trace.note_link(peer, link(Lane::collective, peer).channel->use());
  }
}

void ChannelMesh::begin(const OpTag& tag) {
  rank_state_->begin(tag);
  for (const int peer : opened_[static_cast<int>(Lane::collective)]) {
    Link& l = link(Lane::collective, peer);
    if (l.received() > l.began) l.heard = running_;
    l.began = l.received();
  }
  running_ = tag;
}

std::vector<int> ChannelMesh::missing(int source) {
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

PeerStatus ChannelMesh::look(Lane lane, int rank) {
  if (rank == rank_) return {PeerStatus::Liveness::here, rank_state_->load()};
  PeerStatus status = by_rank_[rank]->look(rank);
  if (status.liveness == PeerStatus::Liveness::silent && lane == Lane::collective) {
    const Link& l = link(lane, rank);
    status.rank_state = RankState();
    status.rank_state.call = l.received() > l.began ? running_ : l.heard;
  }
  return status;
}

std::vector<PeerStatus> ChannelMesh::survey(Lane lane, uint64_t all_inside) {
  using Liveness = PeerStatus::Liveness;
  for (const auto& transport : transports_) transport->ask();
  Milliseconds way(0);
  for (const auto& transport : transports_) way = std::max(way, transport->round_trip());
  const Deadline deadline = Deadline::after(kSurvey + 2 * way);
  std::vector<PeerStatus> ranks(size_);
  for (;;) {
    for (int r = 0; r < size_; r++) ranks[r] = look(lane, r);
    const bool settled = std::all_of(ranks.begin(), ranks.end(), [&](const PeerStatus& s) {
      return s.liveness == Liveness::here ? s.rank_state.call.seq >= all_inside
                                          : s.liveness != Liveness::silent;
    });
    if (settled || deadline.expired() || aborted()) return ranks;
    std::this_thread::sleep_for(kSurveyStep);
    // What they were doing when they answered may be over by now.
    if (all_inside > 0) {
      for (const auto& transport : transports_) transport->ask();
    }
  }
}

std::exception_ptr ChannelMesh::aborted() const {
  for (const auto& transport : transports_) {
    try {
      transport->check();
    } catch (const PeerLost&) {
      continue;
    } catch (const Error&) {
      return from_notice(std::current_exception());
    }
  }
  return nullptr;
}

bool ChannelMesh::lost(int rank) const {
  Transport* transport = by_rank_[rank];
  return transport && transport->look(rank).liveness == PeerStatus::Liveness::died;
}

void ChannelMesh::abort(const Notice& notice) noexcept {
  for (const auto& transport : transports_) transport->abort(notice);
}

}  // namespace pycomm
