// Shared-memory transport: the Transport over a SharedRegion, and how ranks come by one.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transports/host_socket.h"
#include "transports/rendezvous.h"
#include "transports/shm/failure_detector.h"
#include "transports/shm/heap.h"
#include "transports/shm/pace.h"
#include "transports/shm/ring_channel.h"
#include "transports/shm/window.h"

namespace pycomm {

/// The outcome of a rendezvous. All ranks that have the memory have signed their slots; a member
/// whose slot is unsigned could not get it.
struct SharedMemory {
  std::shared_ptr<void> base;    ///< gives the memory back when the last holder releases it
  std::vector<int> members;      ///< ranks of the group that it was made for, ascending
  int rank = 0;                  ///< ours, in the group
  int file = -1;                 ///< the memory's file; `base` keeps it open
  std::shared_ptr<void> permit;  ///< lets the other ranks read our memory

  /// Returns the number in the region of a rank of the group; -1 if it has none.
  int place(int rank) const;
};

class PYCOMM_API ShmTransport final : public Transport {
 public:
  explicit ShmTransport(const SharedMemory& memory);
  ~ShmTransport() override;

  std::string_view name() const override { return "shm"; }
  bool reaches(int rank) const override;
  Channel& channel(int rank, Lane lane) override;
  /// Returns the memory shared by the ranks for which it was made, or null if one of them has no
  /// part in it. Window::size() and member() name them.
  Window* window() { return window_.get(); }
  /// Returns memory of ours that all ranks of the window address in place, or null.
  std::shared_ptr<SharedHeap> heap() { return heap_; }
  void idle(Lane lane, std::chrono::microseconds limit) override;
  void check() override { detector_.check(); }
  PeerStatus look(int rank) override;
  /// Returns where the peers read our state.
  SharedRankState* rank_state() { return &region_.rank_slot(self_).rank_state; }
  void abort(const Notice& notice) noexcept override { detector_.abort(notice); }
  uint64_t sent_bytes() const override;
  std::string describe() const override;

 private:
  /// The state of a lane, driven by one thread at a time.
  struct LaneState {
    std::vector<std::unique_ptr<RingChannel>> channels;  ///< by rank of the region; null: unused
    Traffic traffic;
    Deadline::Clock::time_point yield_end;
    SpinPace pace;
  };

  SharedMemory memory_;
  int self_;
  SharedRegion region_;
  FailureDetector detector_;
  std::unique_ptr<Window> window_;
  std::shared_ptr<SharedHeap> heap_;  ///< null if not all ranks have mapped the heaps
  std::array<LaneState, kLanes> lanes_;
};

/// Makes the transport.
class PYCOMM_API ShmSetup {
 public:
  /// Announces what make() publishes about this rank's host, with the exchange that begins a group,
  /// so that it needs none of its own.
  void announce(const Rendezvous& rendezvous);
  /// Returns the transport to those of `ranks` that are on this host, found by trying, never by
  /// LOCAL_WORLD_SIZE. Null if there is no other.
  std::unique_ptr<ShmTransport> make(const Rendezvous& rendezvous, const std::vector<int>& ranks);

 private:
  std::shared_ptr<HostSocket> socket_;  ///< passes on the region, if we create it
};

/// Returns true if all ranks have announced different hosts (ShmSetup): then none of them shares
/// memory with another, and all ranks know it.
bool hosts_differ(const Rendezvous& rendezvous);

}  // namespace pycomm
