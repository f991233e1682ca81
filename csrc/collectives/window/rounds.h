// Building blocks of collectives over a Window: the pattern that most of them share, the pieces in
// which buffers travel, and the fold. This is a part of shared.cpp.
//
//   rounds()   put our piece, post, wait for the others, take theirs. One stage per round; puts run
//              kAhead rounds ahead, so that waits rarely block.
//   meet_at()  is the first of these stages, and publishes beside its flag where our data lie, if
//              peers can address or read them. If all ranks' data allow it, the call continues
//              without staging.
//
// Every round has a slot of its own, in a ring of four. No put overwrites data that a peer still
// reads, for these reasons (c numbers the slots' uses, through all calls):
//   rounds()     put(c) runs after the wait for round c - 2, which peers post after take(c - 4).
//   across calls The last wait of a call shows that every peer has ended all its slots but the last
//                two; so the first two puts of the next call, which wait for nothing, are safe.
#pragma once
#include <algorithm>
#include <cstring>

#include "collectives/common/collective.h"
#include "core/reduce.h"
#include "transports/shm/window.h"

namespace pycomm::shared {

constexpr size_t kAhead = 2;
static_assert(2 * kAhead == kSlots);
/// Alignment of the areas of a slot: a cache line.
constexpr size_t kGrain = 64;

inline uint8_t* at(void* data, size_t bytes) { return static_cast<uint8_t*>(data) + bytes; }
inline const uint8_t* at(const void* data, size_t bytes) {
  return static_cast<const uint8_t*>(data) + bytes;
}

/// A buffer cut into equal pieces; the last one may be shorter, and those after it are empty.
struct Slicing {
  size_t total;
  size_t piece;

  size_t count() const { return (total + piece - 1) / piece; }
  size_t begin(size_t i) const { return std::min(total, i * piece); }
  size_t size(size_t i) const { return begin(i + 1) - begin(i); }
  template <typename Byte>
  Span<Byte> of(const Span<Byte>& whole, size_t i) const {
    return whole.sub(begin(i), size(i));
  }
};

/// Slices all parts of a call alike.
template <typename T>
struct PartCuts {
  BasicParts<T> parts;
  int ranks;
  size_t piece;

  size_t count() const {
    size_t most = 0;
    for (int r = 0; r < ranks; r++) most = std::max(most, Slicing{parts.bytes(r), piece}.count());
    return most;
  }
  Span<typename BasicParts<T>::Byte> of(int rank, size_t i) const {
    return Slicing{parts.bytes(rank), piece}.of(parts[rank], i);
  }
};

/// A slot cut into an area for each peer, none for ourselves, or one area if a single rank reads.
struct Areas {
  explicit Areas(const Window& window, size_t bytes = kSlotBytes, bool to_one = false)
      : ranks(to_one ? 2 : window.size()),
        each(bytes / static_cast<size_t>(std::max(1, ranks - 1)) / kGrain * kGrain) {}
  /// Offset of the area that `from` writes and `to` reads.
  size_t offset(int from, int to) const {
    if (ranks == 2) return 0;
    return each * static_cast<size_t>(to > from ? to - from - 1 : to - from - 1 + ranks);
  }
  int ranks;
  size_t each;
};

/// Places of the data of all ranks in this call, by Window::place() or private_place().
struct Places {
  explicit Places(Window& window) : window(window) {}
  /// True if all can be addressed by []; else they are read.
  bool in_heaps() const {
    bool all = true;
    for (int r = 0; r < window.size(); r++) all = all && !Window::is_private(place[r]);
    return all;
  }
  uint8_t* operator[](int rank) const { return window.at(rank, place[rank]); }
  void read(int rank, size_t offset, void* to, size_t bytes) const {
    window.read(rank, place[rank], offset, to, bytes);
  }

  Window& window;
  uint64_t place[kMaxRanks];
};

/// Buffers below this size are as fast through staging, which needs one stage less.
constexpr size_t kInPlaceBytes = 2048;

/// Data that peers may use in place. Empty: none.
struct Shown {
  uint64_t place(Window& window) const {
    if (bytes < kInPlaceBytes) return 0;
    const uint64_t place = window.place(data);
    if (place && written) window.let_write({static_cast<const uint8_t*>(data), bytes});
    return place || bytes < private_from ? place : window.private_place(data, bytes);
  }
  const void* data = nullptr;
  size_t bytes = 0;
  size_t private_from = 0;  ///< size from which the kernel reads data that are not in a heap
  bool written = false;     ///< peers write to them too, if they are in a heap
};

/// First stage of a call. Returns true if peers can use the data of all ranks in place. Otherwise
/// the first piece of every rank is in staging; `put()` writes ours.
///
/// A rank that shows its data does not write a piece, which would most likely be unused. If the
/// piece is needed after all, since other ranks show no data, all ranks wait for one more stage.
template <typename Put>
bool meet_at(Window& window, const Shown& shown, Put put, Places& places) {
  const int me = window.rank();
  places.place[me] = shown.place(window);
  if (!places.place[me]) put();
  std::memcpy(window.payload(), &places.place[me], sizeof places.place[me]);
  const uint32_t stage = window.post();
  window.wait(stage);
  int found = 0;
  for (int r = 0; r < window.size(); r++) {
    if (r != me) std::memcpy(&places.place[r], window.payload(r, stage), sizeof places.place[r]);
    found += places.place[r] != 0;
  }
  if (found == window.size() && (places.in_heaps() || window.all_read())) return true;
  if (found > 0) {
    if (places.place[me]) put();
    window.wait(window.post());
  }
  return false;
}

/// Runs the rounds of a call whose piece 0 is in staging on all ranks. `put(i, staging)` writes
/// piece i to our staging memory; `take(i, round)` uses the peers' pieces.
template <typename Put, typename Take>
void more_rounds(Window& window, uint32_t round, size_t count, Put put, Take take) {
  const auto put_and_post = [&](size_t i) {
    put(i, window.staging(window.rank(), round + static_cast<uint32_t>(i)));
    window.post();
  };
  const uint32_t stage = window.next_stage();  // of piece 1
  for (size_t i = 1; i < std::min(kAhead, count); i++) put_and_post(i);
  for (size_t i = 0; i < count; i++) {
    if (i > 0) window.wait(stage + static_cast<uint32_t>(i) - 1);
    take(i, round + static_cast<uint32_t>(i));
    if (i + kAhead < count) put_and_post(i + kAhead);
  }
}

/// Runs all rounds of a call, or `in_place(places)` if all ranks' data can be used in place.
template <typename Put, typename Take, typename InPlace>
void rounds(Window& window, const Shown& shown, size_t count, Put put, Take take,
            InPlace in_place) {
  if (count == 0) return window.wait(window.post());
  const uint32_t round = window.claim(count);
  Places places(window);
  const auto first = [&] { put(0, window.staging(window.rank(), round)); };
  if (meet_at(window, shown, first, places)) return in_place(places);
  more_rounds(window, round, count, put, take);
}

/// Reduction of one call, lowered to the elements of its dtype.
class Reducer {
 public:
  Reducer(const Window& window, const Collective& call)
      : window_(window), element_(size_of(call.dtype)) {
    args_.dtype = call.dtype;
    args_.op = call.redop;
    args_.inputs = inputs_;
    args_.count = window.size();
  }

  /// Folds in rank order. Our own contribution is `mine`; that of rank r is `theirs(r)`.
  template <typename Theirs>
  void run(const void* mine, Theirs theirs, size_t bytes, void* out, void* copy = nullptr) {
    for (int r = 0; r < window_.size(); r++) {
      inputs_[r] = r == window_.rank() ? mine : theirs(r);
    }
    args_.out = out;
    args_.copy = copy;
    args_.numel = bytes / element_;
    reduce(args_);
  }

 private:
  const Window& window_;
  size_t element_;
  ReduceArgs args_ = {};
  const void* inputs_[kMaxRanks];
};

/// Runs a barrier, which also compares tags; for calls without elements.
inline void barrier(Window& window) { window.wait(window.post()); }

}  // namespace pycomm::shared
