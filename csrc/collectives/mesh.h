// The channels of one group: for every pair of ranks the best transport that connects them, and the
// loop in which a thread moves bytes until what it waits for is there.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/failure.h"
#include "collectives/select.h"
#include "collectives/topology.h"
#include "transports/transport.h"

namespace pycomm {

class Attendance;

class Mesh {
 public:
  /// Meets the other ranks and checks that their options agree with ours.
  Mesh(Rendezvous meeting, const CommunicatorOptions& options, Failure& failure);
  ~Mesh() { leave(); }
  /// The end of all transports; until then they may use what was posted. Nothing but the destructor
  /// may follow. TCP goes before shared memory: to its last moment it shows what lies there.
  void leave() {
    while (!transports_.empty()) transports_.pop_back();
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Memory that all ranks address, or null.
  Window* window() const { return topology_.nodes() == 1 ? window_ : nullptr; }
  /// Memory that the ranks of our node address, or null if we are alone there.
  Window* node_window() const { return window_; }
  const Topology& topology() const { return topology_; }
  /// TCP, if there is a pair of ranks that it connects.
  Medium slowest() const { return slowest_; }
  /// Memory of ours that all ranks of the window address in place, or null.
  std::shared_ptr<SharedHeap> heap() const;
  std::string describe() const;
  uint64_t wire_bytes() const;
  uint64_t sent_bytes() const;

  // One thread at a time drives a lane: everything below up to idle().

  uint64_t send(Lane lane, int peer, const OpTag& tag, Span<const uint8_t> data);
  uint64_t recv(Lane lane, int peer, const OpTag& tag, Span<uint8_t> data);
  bool sent(Lane lane, int peer, uint64_t ticket) { return link(lane, peer).sent() >= ticket; }
  bool received(Lane lane, int peer, uint64_t ticket) {
    return link(lane, peer).received() >= ticket;
  }
  /// Something that we posted to this peer is under way.
  bool pending(Lane lane, int peer) { return link(lane, peer).pending(); }

  bool pending(Lane lane);

  /// Moves what can be moved now on one channel, or on all that have something under way.
  bool progress(Lane lane, int peer);
  bool progress(Lane lane);
  /// The last peer with which anything moved.
  int moved_last(Lane lane) const { return moved_last_[static_cast<int>(lane)]; }

  /// One step of a wait in which nothing moved for the `quiet`th time: returns at once, then
  /// yields, then sleeps.
  void pause(Lane lane, int quiet, const Deadline& deadline);
  /// True if that step should also look for failures.
  bool should_check(int quiet) const;
  /// Throws if the group has failed, but not for the loss of a rank with which nothing is under
  /// way: it may have finished before us.
  void check(Lane lane);
  /// The ranks that have died and with which something is under way. Transports tell of the first
  /// death alone, which may be that of another.
  std::vector<int> lost_ones(Lane lane);
  /// Sleeps until a channel of the lane may have something to do.
  void idle(Lane lane, std::chrono::microseconds limit);

  /// Notes in the trace what has gone to whom, if it has not done so for a while.
  void note_links(Trace& trace);

  // What ranks do, for the texts of errors.

  /// A collective over channels begins: from here on, rank r is missing until something from it has
  /// arrived.
  void begin(const OpTag& tag);
  /// For which ranks a collective that ran out of time was waiting. If nothing came from `source`,
  /// the others could not pass it on and are not to blame.
  std::vector<int> missing(int source);
  /// What our peers see of us.
  SharedStanding& standing() { return *standing_; }
  /// What all ranks are doing, asked by the thread that drives the lane. Takes a moment if some
  /// rank does not answer, or has not come to collective number `all_inside` yet; ends early if a
  /// rank aborts.
  std::vector<Sighting> survey(Lane lane, uint64_t all_inside);

  // Any thread.

  void abort(const std::string& reason) noexcept;
  /// What an aborting rank has told us, or null: better than to say that it has left.
  std::exception_ptr aborted() const;
  /// The rank's process is gone, as far as we know now.
  bool lost(int rank) const;

 private:
  /// One direction pair of one lane, and how much of what we posted has been done.
  struct Link {
    Channel* channel = nullptr;
    uint64_t last_send = 0;
    uint64_t last_recv = 0;
    uint64_t began = 0;  ///< received() when the running collective began
    OpTag heard;         ///< the last collective before it of which something has arrived
    uint64_t sent() const { return channel ? channel->sent() : 0; }
    uint64_t received() const { return channel ? channel->received() : 0; }
    bool pending() const { return channel && (last_send > sent() || last_recv > received()); }
  };

  void meet(const Rendezvous& meeting, const CommunicatorOptions& options, Attendance& attendance);
  Link& link(Lane lane, int peer) { return links_[static_cast<int>(lane)][peer]; }
  Channel& open(Lane lane, int peer);
  Sighting look(Lane lane, int rank);

  int rank_;
  int size_;
  Failure& failure_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<Transport*> by_rank_;  ///< null for ourselves
  Window* window_ = nullptr;
  Topology topology_;
  Medium slowest_ = Medium::shared_memory;
  std::mutex opening_;  ///< the lanes' threads may open channels at the same time
  std::vector<Link> links_[kLanes];
  std::vector<int> opened_[kLanes];  ///< peers in order of first use
  int spins_ = 0, yields_ = 0;
  int moved_last_[kLanes] = {};
  int naps_[kLanes] = {};     ///< in a row on one transport while another was waited for as well
  uint64_t links_noted_ = 0;  ///< ticks
  OpTag running_;             ///< the last collective over channels
  SharedStanding own_standing_{};
  SharedStanding* standing_ = &own_standing_;
};

/// "ranks 1, 2 and 3".
std::string join(const std::vector<int>& ranks);

}  // namespace pycomm
