#include "transports/shm/transport.h"

#include <algorithm>

#include "transports/shm/cma.h"

namespace pycomm {

int SharedMemory::place(int rank) const {
  const auto found = std::lower_bound(members.begin(), members.end(), rank);
  return found != members.end() && *found == rank ? static_cast<int>(found - members.begin()) : -1;
}

ShmTransport::ShmTransport(const SharedMemory& memory)
    : memory_(memory),
      self_(memory.place(memory.rank)),
      region_(memory.base.get(), static_cast<int>(memory.members.size())),
      detector_(region_, memory.members, self_) {
  const SpinPace pace(region_);
  bool all = true;
  for (int r = 0; r < region_.ranks(); r++) all = all && region_.present(r);
  if (all) {
    region_.rank_slot(self_).reads.store(cma::readable(region_, self_), std::memory_order_release);
    window_ = std::make_unique<Window>(region_, detector_, self_, pace);
    if (region_.has_heaps()) {
      uint8_t* const own = region_.heap(self_);
      const auto offset = static_cast<size_t>(own - static_cast<uint8_t*>(memory_.base.get()));
      heap_ = std::make_shared<SharedHeap>(memory_.base, own, kHeapBytes,
                                           HeapFile{memory_.file, offset});
    }
  }
  for (LaneState& lane : lanes_) {
    lane.channels.resize(memory.members.size());
    lane.pace = pace;
  }
}

ShmTransport::~ShmTransport() { detector_.leave(); }

bool ShmTransport::reaches(int rank) const {
  const int place = memory_.place(rank);
  return rank != memory_.rank && place >= 0 && region_.present(place);
}

Channel& ShmTransport::channel(int rank, Lane lane) {
  LaneState& state = lanes_[static_cast<size_t>(lane)];
  const int peer = memory_.place(rank);
  auto& slot = state.channels[static_cast<size_t>(peer)];
  if (!slot) {
    slot = std::make_unique<RingChannel>(region_, detector_, self_, peer, lane, state.traffic);
  }
  return *slot;
}

void ShmTransport::idle(Lane lane, std::chrono::microseconds limit) {
  LaneState& state = lanes_[static_cast<size_t>(lane)];
  const auto ready = [&] {
    for (const auto& channel : state.channels) {
      if (channel && channel->ready()) return true;
    }
    return detector_.aborted();
  };
  const auto start = Deadline::Clock::now();
  bool polled = false;
  // A lane in use is worth polling and yielding for; one that no longer moves bytes is not.
  if (state.traffic.moved) {
    state.traffic.moved = false;
    state.yield_end = start + kYieldFor;
    for (int i = state.pace.now(); i > 0; i--) {
      if (ready()) return;
      cpu_relax();
    }
    polled = true;
  }
  int yields = 0;
  Deadline::Clock::duration late{};
  for (auto now = Deadline::Clock::now(); !ready() && now < start + limit;) {
    if (now < state.yield_end) {
      const auto before = now;
      ::sched_yield();
      now = Deadline::Clock::now();
      late = std::max(late, now - before);
      yields++;
    } else {
      const auto left = std::chrono::duration_cast<std::chrono::microseconds>(start + limit - now);
      region_.rank_slot(self_).moved[static_cast<size_t>(lane)].sleep(ready,
                                                                      std::min(left, kSleepAtMost));
      now = Deadline::Clock::now();
    }
  }
  if (polled) state.pace.yielded(yields, late);
}

PeerStatus ShmTransport::look(int rank) {
  const int place = memory_.place(rank);
  PeerStatus status;
  status.rank_state = region_.rank_slot(place).rank_state.load();
  status.liveness = detector_.left(place)      ? PeerStatus::Liveness::left
                    : detector_.died(place)    ? PeerStatus::Liveness::died
                    : detector_.stopped(place) ? PeerStatus::Liveness::stopped
                                               : PeerStatus::Liveness::here;
  return status;
}

uint64_t ShmTransport::sent_bytes() const {
  uint64_t bytes = window_ ? window_->sent_bytes() : 0;
  for (const LaneState& lane : lanes_) {
    bytes += lane.traffic.sent_bytes.load(std::memory_order_relaxed);
  }
  return bytes;
}

std::string ShmTransport::describe() const {
  std::string text = "shm with ";
  for (const int rank : memory_.members) {
    if (!reaches(rank)) continue;
    if (text.back() != ' ') text += ",";
    text += std::to_string(rank);
  }
  if (text.back() == ' ') return text + "nobody";
  // A heap is in use only if all ranks could map it.
  if (window_ && !heap_) text += " (no shared heap: ulimit -f or -v leaves no room for one)";
  return text;
}

}  // namespace pycomm
