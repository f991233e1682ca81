// Collectives over a Window. Two patterns carry all of them:
//
//   rounds()      put our piece, post, wait for the others, take theirs. One stage per round; puts
//                 run kAhead rounds ahead, so that waits rarely wait.
//   two_shot()    per chunk: put the others' areas, post; reduce our area, post; gather the others'
//                 results. The put of chunk i + 1 runs between the reduce of chunk i and its
//                 gather.
//
// Every round and every chunk has a slot of its own, in a ring of four. Why no put overwrites what
// a peer still reads (c numbers the slots' uses, through all calls):
//   rounds()     put(c) runs after the wait for round c - 2, which peers post after take(c - 4).
//   two_shot()   put(c) runs after the wait for put(c - 1), which peers post after gather(c - 3).
//   across calls The last wait of a call shows that every peer has ended all its slots but the last
//                two; so the first two puts of the next call, which wait for nothing, are safe.
#include "collectives/shared.h"

#include <algorithm>
#include <cstring>

namespace pycomm::shared {
namespace {

constexpr size_t kAhead = 2;
static_assert(2 * kAhead == kSlots);

/// Up to here every rank reduces everything itself. Two ranks read as much of each other's memory
/// that way as by two_shot(), with half the stages.
constexpr size_t one_shot_limit(int ranks) {
  return ranks == 2 ? size_t{256} << 10 : size_t{8} << 10;
}

uint8_t* at(void* data, size_t bytes) { return static_cast<uint8_t*>(data) + bytes; }
const uint8_t* at(const void* data, size_t bytes) {
  return static_cast<const uint8_t*>(data) + bytes;
}

/// A buffer cut into equal pieces; the last one may be shorter, and those behind it are empty.
struct Cut {
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

/// Cuts that are made alike in all parts of a call.
template <typename T>
struct PartCuts {
  BasicParts<T> parts;
  int ranks;
  size_t piece;

  size_t count() const {
    size_t most = 0;
    for (int r = 0; r < ranks; r++) most = std::max(most, Cut{parts.bytes(r), piece}.count());
    return most;
  }
  Span<typename BasicParts<T>::Byte> of(int rank, size_t i) const {
    return Cut{parts.bytes(rank), piece}.of(parts[rank], i);
  }
};

/// An empty buffer may have no address, which memcpy does not take.
void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

/// `put(i, staging)` writes piece i to our staging memory; `take(i, round)` uses the peers' pieces.
template <typename Put, typename Take>
void rounds(Window& window, size_t count, Put put, Take take) {
  const uint32_t stage = window.next_stage();
  const uint32_t round = window.claim(count);
  const auto put_and_post = [&](size_t i) {
    put(i, window.staging(window.rank(), round + static_cast<uint32_t>(i)));
    window.post();
  };
  for (size_t i = 0; i < std::min(kAhead, count); i++) put_and_post(i);
  for (size_t i = 0; i < count; i++) {
    window.wait(stage + static_cast<uint32_t>(i));
    take(i, round + static_cast<uint32_t>(i));
    if (i + kAhead < count) put_and_post(i + kAhead);
  }
}

/// The reduction of one call, cut down to its dtype's elements.
class Reducer {
 public:
  Reducer(const Window& window, const OpTag& tag, double factor)
      : window_(window), element_(size_of(tag.dtype)) {
    args_.dtype = tag.dtype;
    args_.op = tag.redop;
    args_.inputs = inputs_;
    args_.count = window.size();
    args_.factor = factor;
  }

  size_t element_bytes() const { return element_; }

  /// Our own contribution is `mine`; that of rank r is `theirs(r)`. Folded in the order of ranks.
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

/// A barrier, and with it the comparison of tags; for calls without elements.
void meet(Window& window) { window.wait(window.post()); }

/// The whole input travels in the cache line of the flag.
void tiny(Window& window, Reducer& reducer, void* data, size_t bytes) {
  std::memcpy(window.payload(), data, bytes);
  const uint32_t stage = window.post();
  window.wait(stage);
  reducer.run(data, [&](int r) { return window.payload(r, stage); }, bytes, data);
}

void one_shot(Window& window, Reducer& reducer, void* data, size_t bytes) {
  const Cut cut{bytes, kSlotBytes};
  rounds(
      window, cut.count(),
      [&](size_t i, uint8_t* staging) {
        std::memcpy(staging, at(data, cut.begin(i)), cut.size(i));
      },
      [&](size_t i, uint32_t round) {
        uint8_t* place = at(data, cut.begin(i));
        reducer.run(place, [&](int r) { return window.staging(r, round); }, cut.size(i), place);
      });
}

class TwoShot {
 public:
  TwoShot(Window& window, Reducer& reducer, void* data, size_t bytes)
      : window_(window),
        reducer_(reducer),
        data_(data),
        area_(kSlotBytes / window.size() / kGrain * kGrain),
        cut_{bytes, area_ * window.size()} {}

  void run() {
    const uint32_t first = window_.claim(cut_.count());
    const auto round = [&](size_t i) { return first + static_cast<uint32_t>(i); };
    put(0, round(0));
    uint32_t stage = window_.post();
    for (size_t i = 0; i < cut_.count(); i++) {
      window_.wait(stage);
      reduce_own(i, round(i));
      const uint32_t reduced = window_.post();
      if (i + 1 < cut_.count()) {
        put(i + 1, round(i + 1));
        stage = window_.post();
      }
      window_.wait(reduced);
      gather(i, round(i));
    }
  }

 private:
  /// Pieces of a chunk are cut at cache lines.
  static constexpr size_t kGrain = 64;

  Span<uint8_t> part(size_t chunk, int rank) const {
    const size_t total = cut_.size(chunk);
    const size_t each = (total + window_.size() * kGrain - 1) / (window_.size() * kGrain) * kGrain;
    const size_t begin = std::min(total, each * rank);
    return {at(data_, cut_.begin(chunk) + begin), std::min(each, total - begin)};
  }
  uint8_t* area(int owner, int rank, uint32_t round) const {
    return window_.staging(owner, round) + area_ * rank;
  }

  void put(size_t chunk, uint32_t round) {
    for (int i = 1; i < window_.size(); i++) {
      const int rank = window_.peer(i);
      const Span<uint8_t> from = part(chunk, rank);
      std::memcpy(area(window_.rank(), rank, round), from.data, from.size);
    }
  }
  void reduce_own(size_t chunk, uint32_t round) {
    const int me = window_.rank();
    const Span<uint8_t> own = part(chunk, me);
    reducer_.run(
        own.data, [&](int r) { return area(r, me, round); }, own.size, own.data,
        area(me, me, round));
  }
  void gather(size_t chunk, uint32_t round) {
    for (int i = 1; i < window_.size(); i++) {
      const int rank = window_.peer(i);
      const Span<uint8_t> to = part(chunk, rank);
      std::memcpy(to.data, area(rank, rank, round), to.size);
    }
  }

  Window& window_;
  Reducer& reducer_;
  void* data_;
  size_t area_;
  Cut cut_;
};

}  // namespace

void all_reduce(Window& window, const OpTag& tag, void* data, double factor, Deadline deadline) {
  check_reducible(tag.dtype, tag.redop);
  window.begin(tag, deadline);
  Reducer reducer(window, tag, factor);
  const size_t bytes = tag.numel * reducer.element_bytes();
  if (bytes == 0) {
    meet(window);
  } else if (bytes <= kTinyBytes) {
    tiny(window, reducer, data, bytes);
  } else if (bytes <= one_shot_limit(window.size())) {
    one_shot(window, reducer, data, bytes);
  } else {
    TwoShot(window, reducer, data, bytes).run();
  }
  window.count_sent(bytes);
  window.end();
}

void reduce_scatter(Window& window, const OpTag& tag, const ConstParts& in, void* out,
                    double factor, Deadline deadline) {
  check_reducible(tag.dtype, tag.redop);
  window.begin(tag, deadline);
  Reducer reducer(window, tag, factor);
  const ConstParts parts = in.of(reducer.element_bytes());
  const int me = window.rank();
  const size_t area = kSlotBytes / window.size() / 64 * 64;
  const PartCuts<const void> cuts{parts, window.size(), area};
  if (cuts.count() == 0) meet(window);
  rounds(
      window, cuts.count(),
      [&](size_t i, uint8_t* staging) {
        for (int k = 1; k < window.size(); k++) {
          const int rank = window.peer(k);
          const Span<const uint8_t> theirs = cuts.of(rank, i);
          copy(staging + area * rank, theirs.data, theirs.size);
          window.count_sent(theirs.size);
        }
      },
      [&](size_t i, uint32_t round) {
        const Span<const uint8_t> own = cuts.of(me, i);
        reducer.run(
            own.data, [&](int r) { return window.staging(r, round) + area * me; }, own.size,
            at(out, i * area));
      });
  window.end();
}

void all_gather(Window& window, const OpTag& tag, const void* in, const Parts& out,
                Deadline deadline) {
  window.begin(tag, deadline);
  const Parts parts = out.of(size_of(tag.dtype));
  const int me = window.rank();
  const PartCuts<void> cuts{parts, window.size(), kSlotBytes};
  if (cuts.count() == 0) meet(window);
  rounds(
      window, cuts.count(),
      [&](size_t i, uint8_t* staging) {
        const Span<uint8_t> own = cuts.of(me, i);
        const uint8_t* from = at(in, i * kSlotBytes);
        copy(staging, from, own.size);
        copy(own.data, from, own.size);
      },
      [&](size_t i, uint32_t round) {
        for (int k = 1; k < window.size(); k++) {
          const int rank = window.peer(k);
          const Span<uint8_t> theirs = cuts.of(rank, i);
          copy(theirs.data, window.staging(rank, round), theirs.size);
        }
      });
  window.count_sent(parts.bytes(me));
  window.end();
}

void broadcast(Window& window, const OpTag& tag, void* data, Deadline deadline) {
  window.begin(tag, deadline);
  const size_t bytes = tag.numel * size_of(tag.dtype);
  const Cut cut{bytes, kSlotBytes};
  const bool root = window.rank() == tag.root;
  if (bytes == 0) meet(window);
  rounds(
      window, cut.count(),
      [&](size_t i, uint8_t* staging) {
        if (root) std::memcpy(staging, at(data, cut.begin(i)), cut.size(i));
      },
      [&](size_t i, uint32_t round) {
        if (!root) {
          std::memcpy(at(data, cut.begin(i)), window.staging(tag.root, round), cut.size(i));
        }
      });
  if (root) window.count_sent(bytes);
  window.end();
}

void barrier(Window& window, const OpTag& tag, Deadline deadline) {
  window.begin(tag, deadline);
  meet(window);
  window.end();
}

}  // namespace pycomm::shared
