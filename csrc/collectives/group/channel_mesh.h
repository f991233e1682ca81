// ChannelMesh: the channels of one group. It has the best transport for every pair of ranks, and
// the loop in which a thread moves bytes until what it waits for has arrived.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/common/cost.h"
#include "collectives/common/links.h"
#include "collectives/common/options.h"
#include "collectives/common/topology.h"
#include "collectives/group/failure.h"
#include "core/trace.h"
#include "transports/shm/transport.h"

namespace pycomm {

class Membership;

class ChannelMesh {
 public:
  /// Runs the rendezvous with the other ranks and checks that their options agree with ours.
  ChannelMesh(Rendezvous rendezvous, const CommunicatorOptions& options, Failure& failure);
  ~ChannelMesh() { leave(); }
  /// Closes all transports, which may use posted buffers until then. Only the destructor may
  /// follow. TCP is closed before shared memory, since it publishes data there until its end.
  void leave() {
    while (!transports_.empty()) transports_.pop_back();
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Window over memory that all ranks address, or null.
  Window* window() const { return window_ && window_->size() == size_ ? window_ : nullptr; }
  /// Window over memory that the ranks of our node address, or null if we are alone on it.
  Window* node_window() const { return window_; }
  /// The nodes of the ranks; sites (links.h) instead, where there are some of several hosts.
  const Topology& topology() const { return topology_; }
  bool has_sites() const { return has_sites_; }
  /// Copies for any thread: the first collective may learn of the network meanwhile.
  std::pair<Topology, Links> known_network() const {
    std::lock_guard<std::mutex> lock(learning_);
    return {topology_, links_between_};
  }
  /// What is known of the network between the ranks.
  const Links& links() const { return links_between_; }
  /// True if ranks may be far from each other and have not told each other their round trips yet
  /// (Communicator does that). Equal on all ranks.
  bool lacks_round_trips() const { return may_be_far_ && !links_between_.has_round_trips(); }
  /// Returns the round trip to a rank in microseconds; 0 if it is ourselves or on our host.
  uint32_t round_trip(int rank) const;
  /// Sets the round trips between all ranks, before the group's first collective over channels.
  void set_round_trips(std::vector<uint32_t> round_trips);
  /// TCP if it connects any pair of ranks.
  Medium slowest() const { return slowest_; }
  /// Heap of this rank that all ranks of the window address in place, or null.
  std::shared_ptr<SharedHeap> heap() const { return shared_ ? shared_->heap() : nullptr; }
  /// To be called when a collective has failed in its middle, before its caller gets the error: if
  /// its buffer lies in the heap, the buffer belongs to this rank alone from then on, whatever
  /// stopped peers do. Returns "", or a sentence that says why this was not possible. Called by the
  /// lane's thread.
  std::string take_back_heap() noexcept;
  std::string describe() const;
  /// The names of the transports: "shm", "tcp", both, or none in a group of one rank.
  std::vector<std::string> transports() const;
  uint64_t wire_bytes() const;
  uint64_t sent_bytes() const;

  // One thread at a time drives a lane: everything below up to idle().

  uint64_t send(Lane lane, int peer, const OpTag& tag, Span<const uint8_t> data);
  uint64_t recv(Lane lane, int peer, const OpTag& tag, Span<uint8_t> data);
  bool sent(Lane lane, int peer, uint64_t ticket) { return link(lane, peer).sent() >= ticket; }
  bool received(Lane lane, int peer, uint64_t ticket) {
    return link(lane, peer).received() >= ticket;
  }
  /// True if something that we posted to this peer is under way.
  bool pending(Lane lane, int peer) { return link(lane, peer).pending(); }

  bool pending(Lane lane);

  /// Moves what can be moved now on one channel, or on all that have something under way.
  bool progress(Lane lane, int peer);
  bool progress(Lane lane);

  /// One step of a wait in which nothing moved for the `quiet`th time: returns at once, then
  /// yields, then sleeps.
  void pause(Lane lane, int quiet, const Deadline& deadline);
  /// True if that step should also check for failures.
  bool should_check(int quiet) const;
  /// Throws if the group has failed, but not for the loss of a rank with which nothing is under
  /// way: that rank may have finished before us.
  void check(Lane lane);
  /// Ranks that have died and with which something is under way. Transports report the first death
  /// alone, which may be that of another rank.
  std::vector<int> lost_ones(Lane lane);
  /// Sleeps until a channel of the lane may have something to do.
  void idle(Lane lane, std::chrono::microseconds limit);

  /// Records in the trace how many bytes went to each rank, unless it has done so recently.
  void note_links(Trace& trace);

  // States of ranks, for the texts of errors.

  /// Marks the start of a collective over channels: from here on, rank r is missing until something
  /// from it has arrived.
  void begin(const OpTag& tag);
  /// Ranks that a collective was waiting for when it ran out of time. If nothing came from
  /// `source`, the others could not pass it on and are not to blame.
  std::vector<int> missing(int source);
  /// The state that our peers see of this rank.
  SharedRankState& rank_state() { return *rank_state_; }
  /// States of all ranks, asked by the thread that drives the lane. Takes a moment if some rank
  /// does not answer or has not reached collective number `all_inside` yet; ends early if a rank
  /// aborts.
  std::vector<PeerStatus> survey(Lane lane, uint64_t all_inside);

  // Any thread.

  void abort(const Notice& notice) noexcept;
  /// The error that an aborting rank has told us, or null. It says more than that the rank has
  /// closed its connection.
  std::exception_ptr aborted() const;
  /// True if the rank's process is gone, as far as we know now.
  bool lost(int rank) const;

 private:
  /// Both directions of one lane to a peer, and how much of what we posted has been done.
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

  void connect(const Rendezvous& rendezvous, const CommunicatorOptions& options,
               Membership& membership);
  void use_sites(const std::vector<int>& first);
  Link& link(Lane lane, int peer) { return links_[static_cast<int>(lane)][peer]; }
  Channel& open(Lane lane, int peer);
  PeerStatus look(Lane lane, int rank);

  int rank_;
  int size_;
  Failure& failure_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<Transport*> by_rank_;  ///< null for ourselves
  ShmTransport* shared_ = nullptr;   ///< of ours, or null
  Window* window_ = nullptr;
  Topology topology_;
  mutable std::mutex learning_;  ///< guards what other threads read while a first collective learns
  Links links_between_;
  bool may_be_far_ = false, has_sites_ = false;
  Medium slowest_ = Medium::shared_memory;
  std::mutex opening_;  ///< the lanes' threads may open channels at the same time
  std::vector<Link> links_[kLanes];
  std::vector<int> opened_[kLanes];  ///< peers in order of first use
  int yields_ = 0;
  int idles_[kLanes] = {};    ///< in a row on one transport while another was waited for as well
  uint64_t links_noted_ = 0;  ///< ticks
  OpTag running_;             ///< the last collective over channels
  SharedRankState own_state_{};
  SharedRankState* rank_state_ = &own_state_;
};

}  // namespace pycomm
