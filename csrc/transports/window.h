// Memory that several ranks address directly, and the flags that say when it may be read. Ranks are
// numbered here by their place among those who share it; errors name them as the group does.
//
// A collective is a run of *stages*. A rank writes into its own staging memory, posts a stage,
// waits until the peers have posted theirs, and reads where the bytes lie. Stages number on through
// all collectives of the group. At its first stage every rank waits for every other: that is how
// calls that differ are found, at no extra message.
//
// Staging is a ring of kSlots slots and is claimed in *rounds*, one slot each, which number on too.
// collectives/shared.cpp says why no rank overwrites what another still reads.
#pragma once
#include <functional>

#include "core/deadline.h"
#include "core/spent.h"
#include "transports/segment.h"

namespace pycomm {

class Watch;

class PYCOMM_API Window {
 public:
  /// `spin`: how often a wait looks before it yields.
  Window(const Segment& segment, Watch& watch, int rank, int spin);

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The group's number of a rank of ours.
  int member(int rank) const;
  /// "rank 3": a rank of the window by its number in the group.
  std::string name(int rank) const;

  /// Opens a collective. Throws Error if an earlier one was not ended, since then the ranks are out
  /// of step for good.
  void begin(const OpTag& tag, Deadline deadline) {
    if (held_) return;
    if (open_) throw_broken();
    open_ = true;
    deadline_ = deadline;
    hash_ = uint64_t{tag.hash()} << 32;
    first_stage_ = next_stage();
    tag_ = tag;
    board_->standing.begin(tag);
  }
  void end() {
    open_ = held_;
    if (!held_) board_->standing.end(tag_);
  }
  /// The same around several collectives of ours that are steps of one call: their own tags then
  /// count for nothing but what they reduce. Long waits call `drive`, which moves what else is on
  /// its way: those for whom we wait may themselves wait for that. True while there is more.
  void hold(const OpTag& tag, Deadline deadline, std::function<bool()> drive) {
    begin(tag, deadline);
    held_ = true;
    drive_ = std::move(drive);
  }
  void release() {
    drive_ = nullptr;
    held_ = false;
    end();
  }

  /// Number of the stage that the next post() announces.
  uint32_t next_stage() const { return stage_ + 1; }
  /// Announces our next stage, with everything written before it. Returns its number.
  uint32_t post() {
    stage_ += 1;
    board_->flags[stage_ % 2].value.store(hash_ | stage_, std::memory_order_release);
    board_->posted.ring();
    return stage_;
  }
  /// Until every peer has posted `stage`. Throws Timeout (names who did not come), WireMismatch (if
  /// it is the first stage and somebody calls something else), PeerLost or Error.
  void wait(uint32_t stage) {
    for (int i = 1; i < size_; i++) wait(peer(i), stage);
  }
  void wait(int rank, uint32_t stage) {
    if (!arrived(rank, stage)) wait_long(rank, stage);
  }
  /// The i-th rank after us, i in [1, size), so that not all ranks read the same memory at once.
  int peer(int i) const { return rank_ + i < size_ ? rank_ + i : rank_ + i - size_; }

  /// kTinyBytes beside the flag of our next post(); a peer may read them once it has waited for it,
  /// and until it posts the next stage.
  uint8_t* payload() { return board_->flags[next_stage() % 2].payload; }
  const uint8_t* payload(int rank, uint32_t stage) const {
    return segment_.board(rank).flags[stage % 2].payload;
  }

  /// Claims the next `count` rounds and returns the first.
  uint32_t claim(size_t count) {
    const uint32_t first = round_;
    round_ += static_cast<uint32_t>(count);
    return first;
  }
  /// A rank's staging memory of a round, kSlotBytes.
  uint8_t* staging(int rank, uint32_t round) const {
    return segment_.staging(rank) + round % kSlots * kSlotBytes;
  }

  /// Where `data` lies in our heap, for peers; 0 if it does not, or if there are no heaps.
  uint64_t place(const void* data) const {
    if (!heaps_) return 0;
    const auto offset =
        static_cast<uint64_t>(static_cast<const uint8_t*>(data) - segment_.heap(rank_));
    return offset < kHeapBytes ? offset + 1 : 0;
  }
  /// The same for memory outside of our heap, which peers get by read(); 0 if they cannot.
  uint64_t private_place(const void* data, size_t bytes) const;
  static bool is_private(uint64_t place) { return (place & kPrivate) != 0; }
  /// True if every rank can read the others' private memory. All ranks agree once they have met.
  bool all_read() const;
  /// The memory in its heap that a rank has called so.
  uint8_t* at(int rank, uint64_t place) const { return segment_.heap(rank) + place - 1; }
  /// Copies from `offset` of what a rank has called so, wherever it is. Throws PeerLost or Error.
  void read(int rank, uint64_t place, size_t offset, void* to, size_t bytes) {
    if (is_private(place)) return read_private(rank, (place & ~kPrivate) + offset, to, bytes);
    if (bytes > 0) std::memcpy(to, at(rank, place) + offset, bytes);
  }

  /// Waits are noted here from now on; null: nowhere.
  void note_waits(Spent* spent) { spent_ = spent; }

  /// Counts what we have written for others to read.
  void count_sent(uint64_t bytes) {
    sent_bytes_.store(sent_bytes_.load(std::memory_order_relaxed) + bytes,
                      std::memory_order_relaxed);
  }
  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }

 private:
  /// Tells addresses in a process from places in a heap.
  static constexpr uint64_t kPrivate = uint64_t{1} << 63;

  bool arrived(int rank, uint32_t stage) const {
    const uint64_t seen =
        segment_.board(rank).flags[stage % 2].value.load(std::memory_order_acquire);
    // Beyond `stage` the peer has already compared our tag with its own.
    return seen == (hash_ | stage) || static_cast<int32_t>(static_cast<uint32_t>(seen) - stage) > 0;
  }
  void wait_long(int rank, uint32_t stage);
  /// Throws WireMismatch if a peer has posted our first stage for another call, or is in another
  /// call of the same number.
  void compare_tags(uint32_t stage) const;
  void read_private(int rank, uint64_t address, void* to, size_t bytes);
  [[noreturn]] void throw_unreadable(int rank, int error);
  [[noreturn]] void throw_timeout(uint32_t stage) const;
  [[noreturn]] void throw_broken() const;

  Segment segment_;
  Watch& watch_;
  Board* board_;  ///< our own
  int rank_;
  int size_;
  int spin_;
  bool heaps_;
  uint32_t stage_ = 0;
  uint32_t round_ = 0;
  OpTag tag_;          ///< of the open collective, as are the next two
  uint64_t hash_ = 0;  ///< in the high half
  uint32_t first_stage_ = 0;
  bool open_ = false;
  bool held_ = false;
  std::function<bool()> drive_;
  Deadline deadline_ = Deadline::after(Milliseconds(0));
  std::atomic<uint64_t> sent_bytes_{0};
  Spent* spent_ = nullptr;
};

}  // namespace pycomm
