// Window: memory that several ranks address directly, and the flags that tell when it may be read.
// Ranks are numbered here by their place among those who share it; errors name them as the group
// does.
//
// A collective is a run of *stages*. A rank writes into its own staging memory, posts a stage,
// waits until the peers have posted theirs, and reads where the bytes lie. Stages number on through
// all collectives of the group. At its first stage every rank waits for every other: that finds
// calls that differ, at no extra message.
//
// Staging is a ring of kSlots slots and is claimed in *rounds*, one slot each, which number on too.
// collectives/window/shared.cpp says why no rank overwrites bytes that another still reads.
#pragma once
#include <functional>
#include <vector>

#include "core/deadline.h"
#include "core/op_timing.h"
#include "transports/shm/pace.h"
#include "transports/shm/region.h"

namespace pycomm {

class FailureDetector;

class PYCOMM_API Window {
 public:
  Window(const SharedRegion& region, FailureDetector& detector, int rank, SpinPace pace);

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Returns the group's number of a rank of the window.
  int member(int rank) const;
  /// Returns "rank 3": the name of a rank of the window by its number in the group.
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
    own_slot_->rank_state.begin(tag);
  }
  /// Throws Error if a rank has aborted in this call: bytes read from it since may be anything.
  void end() {
    std::atomic_thread_fence(std::memory_order_acquire);  // after all reads of peers' memory
    if (aborted_here()) throw_aborted();
    written_ = {};
    open_ = held_;
    if (!held_) own_slot_->rank_state.end(tag_);
  }
  /// Opens a call whose steps are several collectives of ours: of their own tags then only the
  /// reduction counts. Long waits call `drive`, which moves other pending bytes, since the awaited
  /// ranks may themselves wait for those. It returns true while there is more.
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
    own_slot_->flags[stage_ % 2].value.store(hash_ | stage_, std::memory_order_release);
    own_slot_->posted.ring();
    return stage_;
  }
  /// Waits until every peer has posted `stage`. Throws Timeout (names the missing ranks),
  /// WireMismatch (if it is the first stage and a peer calls something else), PeerLost or Error.
  void wait(uint32_t stage) {
    for (int i = 1; i < size_; i++) wait(peer(i), stage);
  }
  void wait(int rank, uint32_t stage) {
    if (!arrived(rank, stage)) wait_long(rank, stage);
  }
  /// Returns the i-th rank after us, i in [1, size), so that not all ranks read the same memory at
  /// once.
  int peer(int i) const { return rank_ + i < size_ ? rank_ + i : rank_ + i - size_; }

  /// Returns the kTinyBytes beside the flag of our next post(); a peer may read them once it has
  /// waited for it, and until it posts the next stage.
  uint8_t* payload() { return own_slot_->flags[next_stage() % 2].payload; }
  const uint8_t* payload(int rank, uint32_t stage) const {
    return region_.rank_slot(rank).flags[stage % 2].payload;
  }

  /// Claims the next `count` rounds and returns the first.
  uint32_t claim(size_t count) {
    const uint32_t first = round_;
    round_ += static_cast<uint32_t>(count);
    return first;
  }
  /// Returns a rank's staging memory of a round, kSlotBytes.
  uint8_t* staging(int rank, uint32_t round) const {
    return region_.staging(rank) + round % kSlots * kSlotBytes;
  }

  /// Returns the place of `data` in our heap, for peers; 0 if it is not there, or if there are no
  /// heaps.
  uint64_t place(const void* data) const {
    if (!heaps_) return 0;
    const auto offset = static_cast<uint64_t>(static_cast<const uint8_t*>(data) - heap_of_[rank_]);
    return offset < kHeapBytes ? offset + 1 : 0;
  }
  /// Returns a place for memory outside of our heap, which peers copy by read(); 0 if they cannot.
  uint64_t private_place(const void* data, size_t bytes) const;
  static bool is_private(uint64_t place) { return (place & kPrivate) != 0; }
  /// Notes memory in our heap that peers will write, too, until the call has ended on all ranks.
  void let_write(Span<const uint8_t> memory) { written_ = memory; }
  /// Returns where they may still write after a call that has failed.
  Span<const uint8_t> written_late() const { return written_; }
  /// True if every rank can read the others' private memory. All ranks agree once the rendezvous is
  /// complete.
  bool all_read() const;
  /// Returns the memory at a place in a rank's heap.
  uint8_t* at(int rank, uint64_t place) const { return heap_of_[rank] + place - 1; }
  /// Copies from `offset` at a place of a rank, in a heap or private. Throws PeerLost or Error.
  void read(int rank, uint64_t place, size_t offset, void* to, size_t bytes) {
    if (is_private(place)) return read_private(rank, (place & ~kPrivate) + offset, to, bytes);
    if (bytes > 0) std::memcpy(to, at(rank, place) + offset, bytes);
  }

  /// Records waits in `timing` from now on; null: nowhere.
  void note_waits(OpTiming* timing) { timing_ = timing; }

  /// Counts the bytes that we have written for others to read.
  void count_sent(uint64_t bytes) {
    sent_bytes_.store(sent_bytes_.load(std::memory_order_relaxed) + bytes,
                      std::memory_order_relaxed);
  }
  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }

 private:
  /// The bit that tells addresses in a process from places in a heap.
  static constexpr uint64_t kPrivate = uint64_t{1} << 63;

  bool arrived(int rank, uint32_t stage) const {
    const uint64_t seen =
        region_.rank_slot(rank).flags[stage % 2].value.load(std::memory_order_acquire);
    // Beyond `stage` the peer has already compared our tag with its own.
    return seen == (hash_ | stage) || static_cast<int32_t>(static_cast<uint32_t>(seen) - stage) > 0;
  }
  void wait_long(int rank, uint32_t stage);
  /// True if a rank has aborted before it completed this call. A later abort takes nothing from the
  /// call: a collective that uses others' buffers in place ends with a stage that waits for all,
  /// and the bytes in staging are not written any more.
  bool aborted_here() const {
    const uint32_t abort = region_.header().abort.load(std::memory_order_relaxed);
    return abort != Header::kNone && !has_completed(static_cast<int>(abort / Header::kStep));
  }
  bool has_completed(int rank) const;
  /// Throws WireMismatch if a peer has posted our first stage for another call, or is in another
  /// call of the same number.
  void compare_tags(uint32_t stage) const;
  void read_private(int rank, uint64_t address, void* to, size_t bytes);
  [[noreturn]] void throw_unreadable(int rank, int error);
  [[noreturn]] void throw_aborted() const;
  [[noreturn]] void throw_timeout(uint32_t stage) const;
  [[noreturn]] void throw_broken() const;

  SharedRegion region_;
  FailureDetector& detector_;
  RankSlot* own_slot_;  ///< our own slot
  int rank_;
  int size_;
  SpinPace pace_;
  bool heaps_;
  std::vector<uint8_t*> heap_of_;  ///< by rank, if there are heaps
  Span<const uint8_t> written_{};
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
  OpTiming* timing_ = nullptr;
};

}  // namespace pycomm
