// Shared-memory transport: the Transport over a SharedRegion that make_local and make_shm build
// once they have the memory.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transports/shm/failure_detector.h"
#include "transports/shm/heap.h"
#include "transports/shm/kept_heaps.h"
#include "transports/shm/pace.h"
#include "transports/shm/ring_channel.h"
#include "transports/shm/window.h"

namespace pycomm {

/// The outcome of a rendezvous. All ranks that have the memory have signed their slots; a member
/// whose slot is unsigned could not get it.
struct SharedMemory {
  std::shared_ptr<void> base;  ///< gives the memory back when the last holder releases it
  std::vector<int> members;    ///< ranks of the group that it was made for, ascending
  int rank = 0;                ///< ours, in the group
  int file = -1;               ///< the memory's file, or -1; `base` keeps it open
  std::shared_ptr<const KeptHeaps> heaps;  ///< of a former group; null: those in this memory
  FailureDetector::Handles handles;        ///< of ranks in other PID namespaces
  std::shared_ptr<void> permit;            ///< lets the other ranks read our memory

  /// Returns the number in the region of a rank of the group; -1 if it has none.
  int place(int rank) const;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(std::string name, const SharedMemory& memory);
  ~ShmTransport() override;

  std::string_view name() const override { return name_; }
  bool reaches(int rank) const override;
  Channel& channel(int rank, Lane lane) override;
  Window* window() override { return window_.get(); }
  std::shared_ptr<SharedHeap> heap() override { return heaps_ ? heaps_->heap : nullptr; }
  std::shared_ptr<const KeptHeaps> kept_heaps() override { return heaps_; }
  void idle(Lane lane, std::chrono::microseconds limit) override;
  void check() override { detector_.check(); }
  PeerStatus look(int rank) override;
  SharedRankState* rank_state() override { return &region_.rank_slot(self_).rank_state; }
  void abort(const Notice& notice) noexcept override { detector_.abort(notice); }
  uint64_t sent_bytes() const override;
  std::string describe() const override;

 private:
  std::shared_ptr<const KeptHeaps> heaps_here() const;
  /// The state of a lane, driven by one thread at a time.
  struct LaneState {
    std::vector<std::unique_ptr<RingChannel>> channels;  ///< by rank of the region; null: unused
    Traffic traffic;
    Deadline::Clock::time_point yield_end;
    SpinPace pace;
  };

  std::string name_;
  SharedMemory memory_;
  int self_;
  SharedRegion region_;
  FailureDetector detector_;
  std::unique_ptr<Window> window_;
  std::shared_ptr<const KeptHeaps> heaps_;  ///< those in use; null if there are none
  std::array<LaneState, kLanes> lanes_;
};

/// Returns true if all ranks have announced different hosts (announce_shm()): then none of them
/// shares memory with another, and all ranks know it.
bool hosts_differ(const Rendezvous& rendezvous);

}  // namespace pycomm
