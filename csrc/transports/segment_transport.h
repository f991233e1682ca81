// The Transport over a Segment: what make_local and make_shm build once they have the memory.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transports/ring_channel.h"
#include "transports/shared_heap.h"
#include "transports/watch.h"
#include "transports/window.h"

namespace pycomm {

/// What a meeting came to. The boards of all who have the memory are signed; a member whose board
/// is not could not get it.
struct SharedMemory {
  std::shared_ptr<void> base;  ///< gives the memory back when the last holder lets go
  std::vector<int> members;    ///< ranks of the group that it was made for, ascending
  int rank = 0;                ///< ours, in the group
  int lock_fd = -1;            ///< for the Watch; `base` keeps it open

  /// Number in the segment of a rank of the group; -1 if it has none.
  int place(int rank) const;
};

class SegmentTransport final : public Transport {
 public:
  SegmentTransport(std::string name, const SharedMemory& memory);
  ~SegmentTransport() override;

  std::string_view name() const override { return name_; }
  bool reaches(int rank) const override;
  Channel& channel(int rank, Lane lane) override;
  Window* window() override { return window_.get(); }
  std::shared_ptr<SharedHeap> heap() override { return heap_; }
  void idle(Lane lane, std::chrono::microseconds limit) override;
  void check() override { watch_.check(); }
  Sighting look(int rank) override;
  SharedStanding* standing() override { return &segment_.board(self_).standing; }
  void abort(const std::string& reason) noexcept override { watch_.abort(reason); }
  uint64_t sent_bytes() const override;
  std::string describe() const override;

 private:
  /// Driven by one thread at a time.
  struct LaneState {
    std::vector<std::unique_ptr<RingChannel>> channels;  ///< by rank of the segment; null: unused
    Traffic traffic;
    Deadline::Clock::time_point yield_end;
  };

  std::string name_;
  SharedMemory memory_;
  int self_;
  Segment segment_;
  Watch watch_;
  int spin_;
  std::unique_ptr<Window> window_;
  std::shared_ptr<SharedHeap> heap_;
  std::array<LaneState, kLanes> lanes_;
};

}  // namespace pycomm
