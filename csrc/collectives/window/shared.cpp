// Collectives over a Window that reduce. Those that only move bytes: shared_move.cpp.
#include "collectives/window/shared.h"

#include "collectives/window/cma_read.h"
#include "collectives/window/in_place.h"

namespace pycomm::shared {
namespace {

/// Size up to which every rank reduces everything itself. Two ranks read as much of each other's
/// memory that way as by TwoShot, with half the stages.
constexpr size_t one_shot_limit(int ranks) {
  return ranks == 2 ? size_t{256} << 10 : size_t{8} << 10;
}

/// Reduces a tiny input, which travels as a whole in the cache line of the flag.
void tiny(Window& window, Reducer& reducer, const void* in, void* out, size_t bytes) {
  std::memcpy(window.payload(), in, bytes);
  window.count_sent(bytes);
  const uint32_t stage = window.post();
  window.wait(stage);
  if (out) reducer.run(in, [&](int r) { return window.payload(r, stage); }, bytes, out);
}

/// All-reduce without staging.
void all_reduce_there(Window& window, Reducer& reducer, const Places& places, void* data,
                      size_t bytes) {
  if (places.in_heaps()) return in_place::all_reduce(window, reducer, places, bytes);
  cma_read::all_reduce(window, reducer, places, data, bytes);
}

/// One-shot reduction. `out` is null where the result is not wanted. `shown` is the data if the
/// call may continue in place.
void one_shot(Window& window, Reducer& reducer, const void* in, void* out, size_t bytes,
              const Shown& shown) {
  const Slicing cut{bytes, kSlotBytes};
  rounds(
      window, shown, cut.count(),
      [&](size_t i, uint8_t* staging) {
        std::memcpy(staging, at(in, cut.begin(i)), cut.size(i));
        window.count_sent(cut.size(i));
      },
      [&](size_t i, uint32_t round) {
        if (!out) return;
        reducer.run(
            at(in, cut.begin(i)), [&](int r) { return window.staging(r, round); }, cut.size(i),
            at(out, cut.begin(i)));
      },
      [&](const Places& places) { all_reduce_there(window, reducer, places, out, bytes); });
}

/// Two-shot reduction. Per chunk: put the others' areas, post; reduce our area, post; gather the
/// others' results. The put of chunk i + 1 runs between the reduce of chunk i and its gather. It
/// overwrites nothing that is still read (see rounds.h): put(c) runs after the wait for put(c - 1),
/// which peers post after gather(c - 3).
class TwoShot {
 public:
  /// The result goes to `out` of the root, or of all ranks if `root` is -1.
  TwoShot(Window& window, Reducer& reducer, const void* in, void* out, size_t bytes, int root)
      : window_(window),
        reducer_(reducer),
        in_(in),
        out_(out),
        root_(root),
        area_(kSlotBytes / window.size() / kGrain * kGrain),
        cut_{bytes, area_ * window.size()} {}

  /// `shown` is the data if the call may continue in place.
  void run(const Shown& shown) {
    const uint32_t first = window_.claim(cut_.count());
    const auto round = [&](size_t i) { return first + static_cast<uint32_t>(i); };
    Places places(window_);
    if (meet_at(window_, shown, [&] { put(0, round(0)); }, places)) {
      return all_reduce_there(window_, reducer_, places, out_, cut_.total);
    }
    uint32_t stage = 0;
    for (size_t i = 0; i < cut_.count(); i++) {
      if (i > 0) window_.wait(stage);
      reduce_own(i, round(i));
      const uint32_t reduced = window_.post();
      if (i + 1 < cut_.count()) {
        put(i + 1, round(i + 1));
        stage = window_.post();
      }
      window_.wait(reduced);
      if (here()) gather(i, round(i));
    }
  }

 private:
  bool here() const { return root_ < 0 || root_ == window_.rank(); }
  /// Returns the piece of a chunk that a rank owns, as an offset and a size. Cuts are at cache
  /// lines.
  Span<uint8_t> part(void* data, size_t chunk, int rank) const {
    const size_t total = cut_.size(chunk);
    const size_t each = (total + window_.size() * kGrain - 1) / (window_.size() * kGrain) * kGrain;
    const size_t begin = std::min(total, each * rank);
    return {at(data, cut_.begin(chunk) + begin), std::min(each, total - begin)};
  }
  Span<const uint8_t> part(const void* data, size_t chunk, int rank) const {
    return part(const_cast<void*>(data), chunk, rank);
  }
  uint8_t* area(int owner, int rank, uint32_t round) const {
    return window_.staging(owner, round) + area_ * rank;
  }

  void put(size_t chunk, uint32_t round) {
    for (int i = 1; i < window_.size(); i++) {
      const int rank = window_.peer(i);
      const Span<const uint8_t> from = part(in_, chunk, rank);
      std::memcpy(area(window_.rank(), rank, round), from.data, from.size);
      window_.count_sent(from.size);
    }
  }
  void reduce_own(size_t chunk, uint32_t round) {
    const int me = window_.rank();
    const Span<const uint8_t> own = part(in_, chunk, me);
    uint8_t* shown = root_ == me ? nullptr : area(me, me, round);
    if (shown) window_.count_sent(own.size);
    uint8_t* kept = here() ? part(out_, chunk, me).data : nullptr;
    reducer_.run(
        own.data, [&](int r) { return area(r, me, round); }, own.size, kept ? kept : shown,
        kept ? shown : nullptr);
  }
  void gather(size_t chunk, uint32_t round) {
    for (int i = 1; i < window_.size(); i++) {
      const int rank = window_.peer(i);
      const Span<uint8_t> to = part(out_, chunk, rank);
      std::memcpy(to.data, area(rank, rank, round), to.size);
    }
  }

  Window& window_;
  Reducer& reducer_;
  const void* in_;
  void* out_;
  int root_;
  size_t area_;
  Slicing cut_;
};

}  // namespace

void all_reduce(Window& window, const OpTag& tag, void* data, Deadline deadline) {
  check_reducible(tag.dtype, tag.redop);
  window.begin(tag, deadline);
  Reducer reducer(window, tag);
  const size_t bytes = tag.numel * reducer.element_bytes();
  const Shown shown{data, bytes, cma_read::all_reduce_from(window.size()), !window.one_mapping()};
  if (bytes == 0) {
    barrier(window);
  } else if (bytes <= kTinyBytes) {
    tiny(window, reducer, data, data, bytes);
  } else if (bytes <= one_shot_limit(window.size())) {
    one_shot(window, reducer, data, data, bytes, shown);
  } else {
    TwoShot(window, reducer, data, data, bytes, -1).run(shown);
  }
  window.end();
}

void reduce_scatter(Window& window, const OpTag& tag, const ConstParts& in, void* out,
                    Deadline deadline) {
  check_reducible(tag.dtype, tag.redop);
  window.begin(tag, deadline);
  Reducer reducer(window, tag);
  const ConstParts parts = in.of(reducer.element_bytes());
  const int me = window.rank();
  const Areas areas(window);
  const PartCuts<const void> cuts{parts, window.size(), areas.each};
  Shown shown;
  if (!parts.is_list() && parts.bytes(0) >= kInPlaceBytes) {
    shown = {parts.data(), parts.bytes(0) * window.size(),
             cma_read::reduce_scatter_from(window.size())};
  }
  rounds(
      window, shown, cuts.count(),
      [&](size_t i, uint8_t* staging) {
        for (int k = 1; k < window.size(); k++) {
          const int rank = window.peer(k);
          const Span<const uint8_t> theirs = cuts.of(rank, i);
          copy(staging + areas.offset(me, rank), theirs.data, theirs.size);
          window.count_sent(theirs.size);
        }
      },
      [&](size_t i, uint32_t round) {
        const Span<const uint8_t> own = cuts.of(me, i);
        reducer.run(
            own.data, [&](int r) { return window.staging(r, round) + areas.offset(r, me); },
            own.size, at(out, i * areas.each));
      },
      [&](const Places& places) {
        const size_t bytes = parts.bytes(0);
        if (places.in_heaps()) {
          return in_place::reduce_scatter(window, reducer, places, bytes, out);
        }
        cma_read::reduce_scatter(window, reducer, places, parts[me].data, bytes, out);
      });
  window.end();
}

void reduce(Window& window, const OpTag& tag, const void* in, void* out, Deadline deadline) {
  check_reducible(tag.dtype, tag.redop);
  window.begin(tag, deadline);
  Reducer reducer(window, tag);
  const size_t bytes = tag.numel * reducer.element_bytes();
  void* here = window.rank() == tag.root ? out : nullptr;
  if (bytes == 0) {
    barrier(window);
  } else if (bytes <= kTinyBytes) {
    tiny(window, reducer, in, here, bytes);
  } else if (bytes <= one_shot_limit(window.size()) || window.size() == 2) {
    one_shot(window, reducer, in, here, bytes, {});
  } else {
    TwoShot(window, reducer, in, here, bytes, tag.root).run({});
  }
  window.end();
}

}  // namespace pycomm::shared
