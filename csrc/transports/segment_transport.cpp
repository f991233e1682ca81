#include "transports/segment_transport.h"

#include <algorithm>

#include "core/env.h"
#include "transports/pace.h"
#include "transports/peer_memory.h"

namespace pycomm {

int SharedMemory::place(int rank) const {
  const auto found = std::lower_bound(members.begin(), members.end(), rank);
  return found != members.end() && *found == rank ? static_cast<int>(found - members.begin()) : -1;
}

SegmentTransport::SegmentTransport(std::string name, const SharedMemory& memory)
    : name_(std::move(name)),
      memory_(memory),
      self_(memory.place(memory.rank)),
      segment_(memory.base.get(), static_cast<int>(memory.members.size())),
      watch_(segment_, memory.members, self_, memory.lock_fd),
      spin_(looks(segment_, env().spin)) {
  bool all = true;
  for (int r = 0; r < segment_.ranks(); r++) all = all && segment_.present(r);
  if (all) {
    segment_.board(self_).reads.store(peer_memory::readable(segment_, self_),
                                      std::memory_order_release);
    window_ = std::make_unique<Window>(segment_, watch_, self_, spin_);
    if (segment_.has_heaps()) {
      heap_ = std::make_shared<SharedHeap>(memory_.base, segment_.heap(self_), kHeapBytes);
    }
  }
  for (LaneState& lane : lanes_) lane.channels.resize(memory.members.size());
}

SegmentTransport::~SegmentTransport() { watch_.leave(); }

bool SegmentTransport::reaches(int rank) const {
  const int place = memory_.place(rank);
  return rank != memory_.rank && place >= 0 && segment_.present(place);
}

Channel& SegmentTransport::channel(int rank, Lane lane) {
  if (!reaches(rank)) {
    throw Error(name_ + ": rank " + std::to_string(memory_.rank) + " has no channel to rank " +
                std::to_string(rank));
  }
  LaneState& state = lanes_[static_cast<size_t>(lane)];
  const int peer = memory_.place(rank);
  auto& slot = state.channels[static_cast<size_t>(peer)];
  if (!slot) {
    slot = std::make_unique<RingChannel>(segment_, watch_, self_, peer, lane, state.traffic);
  }
  return *slot;
}

void SegmentTransport::idle(Lane lane, std::chrono::microseconds limit) {
  LaneState& state = lanes_[static_cast<size_t>(lane)];
  const auto ready = [&] {
    for (const auto& channel : state.channels) {
      if (channel && channel->ready()) return true;
    }
    return watch_.aborted();
  };
  const auto start = Deadline::Clock::now();
  // A lane that is in use is worth looking at and yielding for; one that has been still is not.
  if (state.traffic.moved) {
    state.traffic.moved = false;
    state.yield_end = start + kYieldFor;
    for (int i = 0; i < spin_; i++) {
      if (ready()) return;
      cpu_relax();
    }
  }
  for (auto now = start; !ready() && now < start + limit; now = Deadline::Clock::now()) {
    if (now < state.yield_end) {
      ::sched_yield();
    } else {
      const auto left = std::chrono::duration_cast<std::chrono::microseconds>(start + limit - now);
      segment_.board(self_).moved[static_cast<size_t>(lane)].sleep(ready,
                                                                   std::min(left, kSleepAtMost));
    }
  }
}

Sighting SegmentTransport::look(int rank) {
  const int place = memory_.place(rank);
  Sighting sighting;
  sighting.standing = segment_.board(place).standing.load();
  sighting.presence = watch_.left(place)      ? Sighting::Presence::left
                      : watch_.died(place)    ? Sighting::Presence::died
                      : watch_.stopped(place) ? Sighting::Presence::stopped
                                              : Sighting::Presence::here;
  return sighting;
}

uint64_t SegmentTransport::sent_bytes() const {
  uint64_t bytes = window_ ? window_->sent_bytes() : 0;
  for (const LaneState& lane : lanes_) {
    bytes += lane.traffic.sent_bytes.load(std::memory_order_relaxed);
  }
  return bytes;
}

std::string SegmentTransport::describe() const {
  std::string text = name_ + " with ";
  for (const int rank : memory_.members) {
    if (!reaches(rank)) continue;
    if (text.back() != ' ') text += ",";
    text += std::to_string(rank);
  }
  return text.back() == ' ' ? text + "nobody" : text;
}

}  // namespace pycomm
