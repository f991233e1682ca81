// CollectiveContext: one collective call over the channels of a mesh.
#pragma once
#include <algorithm>
#include <cstdlib>

#include "codecs/base/feedback.h"
#include "collectives/common/cost.h"
#include "collectives/group/channel_mesh.h"
#include "core/interrupt.h"
#include "core/trace.h"

namespace pycomm {

/// Memory that collectives use in turn. It grows to the largest request and stays.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  /// Returns at least `bytes`, aligned to a cache line. The previous contents are lost.
  uint8_t* get(size_t bytes);
  /// Memory for codecs with feedback, separate from get().
  feedback::Scratch& feedback() { return feedback_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  feedback::Scratch feedback_;
};

/// Record of a running operation in the group's trace, and what will be written there.
struct Recording {
  Trace& trace;
  uint64_t id;
  OpTiming& timing;
};

/// View that one collective has of the mesh: what it posts carries its tag, and its waits have its
/// deadline. It covers all ranks of the group or some of them: then ranks are numbered by their
/// place among those.
class CollectiveContext {
 public:
  CollectiveContext(ChannelMesh& mesh, Scratch& scratch, const OpTag& tag, Deadline deadline,
                    size_t segment_bytes, Recording recording)
      : mesh_(mesh),
        scratch_(&scratch),
        tag_(tag),
        deadline_(deadline),
        segment_bytes_(segment_bytes),
        rank_(mesh.rank()),
        size_(mesh.size()),
        shares_(mesh.links().shares()),
        recording_(recording) {
    mesh.begin(tag);
  }
  /// Returns the same call among `members`, of which this rank is one. They belong to the caller.
  CollectiveContext among(const std::vector<int>& members) const {
    CollectiveContext result = *this;
    result.members_ = &members;
    result.size_ = static_cast<int>(members.size());
    const auto ours = std::find(members.begin(), members.end(), mesh_.rank());
    result.rank_ = static_cast<int>(ours - members.begin());
    result.shares_ = mesh_.links().shares(members);
    return result;
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// True if it covers all ranks of the group.
  bool is_group() const { return !members_; }
  /// Number in the group of a rank of this context.
  int member(int rank) const { return members_ ? (*members_)[rank] : rank; }
  const Topology& topology() const { return mesh_.topology(); }
  bool has_sites() const { return mesh_.has_sites(); }
  Window* node_window() const { return mesh_.node_window(); }
  Medium medium() const { return mesh_.slowest(); }
  /// Shares of the ranks in what they reduce for all. They never change, since owners keep
  /// residuals.
  const Shares& shares() const { return shares_; }
  const Speed& speed() const { return mesh_.links().speed(); }
  const Deadline& deadline() const { return deadline_; }
  const OpTag& tag() const { return tag_; }
  /// Bytes per segment that a test asked for, or 0.
  size_t segment_bytes() const { return segment_bytes_; }
  /// Elements of a segment, in which a run of bytes travels, so that the first are used while the
  /// last are in transit.
  size_t segment_numel(size_t element) const {
    return std::max<size_t>(1, plain_segment(segment_bytes_, speed()) / element);
  }
  /// The rank `steps` after ours; each rank begins with another peer, so that no rank is flooded.
  int after(int steps) const { return (rank() + steps) % size(); }

  /// Records the algorithm's name in the trace.
  void note_algo(const char* algo) { recording_.trace.set_algo(recording_.id, algo); }

  /// Time of the operation's stages, for the trace.
  OpTiming& timing() { return recording_.timing; }

  /// Records that everything comes from this rank, possibly by way of others. For the text of a
  /// Timeout.
  void set_source(int rank) { source_ = member(rank); }

  /// Memory that is valid until the end of the collective; one call only.
  uint8_t* scratch(size_t bytes) { return scratch_->get(bytes); }
  feedback::Scratch& feedback_scratch() { return scratch_->feedback(); }
  /// Gives this view other memory than that of the context from which it was made.
  void use(Scratch& scratch) { scratch_ = &scratch; }

  uint64_t send(int peer, const void* data, size_t bytes) {
    return mesh_.send(Lane::collective, member(peer), tag_,
                      {static_cast<const uint8_t*>(data), bytes});
  }
  uint64_t recv(int peer, void* data, size_t bytes) {
    return mesh_.recv(Lane::collective, member(peer), tag_, {static_cast<uint8_t*>(data), bytes});
  }
  bool received(int peer, uint64_t ticket) {
    return mesh_.received(Lane::collective, member(peer), ticket);
  }
  void progress() { mesh_.progress(Lane::collective); }
  /// Moves what can be moved now; returns true while something is on its way.
  bool drive() {
    progress();
    return mesh_.pending(Lane::collective);
  }

  /// Moves bytes until done() is true.
  template <typename Done>
  void wait_until(const Done& done) {
    uint64_t quiet_since = 0;
    for (int quiet = 0; !done();) {
      if (mesh_.progress(Lane::collective)) {
        if (quiet > 0) timing().waited += ticks() - quiet_since;
        quiet = 0;
      } else {
        if (quiet == 0) quiet_since = ticks();
        pause(quiet++);
      }
    }
  }
  /// Waits until the receive with this ticket is complete.
  void wait(int peer, uint64_t ticket) {
    wait_until([&] { return received(peer, ticket); });
  }
  /// Waits until the buffer of the send with this ticket may be reused.
  void wait_sent(int peer, uint64_t ticket) {
    wait_until([&] { return mesh_.sent(Lane::collective, member(peer), ticket); });
  }
  /// Waits until everything posted is sent and received.
  void wait_all();

 private:
  void pause(int quiet);

  ChannelMesh& mesh_;
  Scratch* scratch_;
  const OpTag& tag_;
  Deadline deadline_;
  size_t segment_bytes_;
  int rank_;
  int size_;
  Shares shares_;
  const std::vector<int>* members_ = nullptr;  ///< null: all
  Recording recording_;
  InterruptPoll interrupts_;
  int source_ = -1;
};

}  // namespace pycomm
