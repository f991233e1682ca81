#include "collectives/window/shared.h"

#include "collectives/window/rounds.h"
#include "core/error.h"

namespace pycomm::shared {
namespace {

// ------------------------------------------------------------------ in place

// In-place collectives: every rank reads the others' data where they lie, and each byte is copied
// once. The data are in the heaps of their ranks (transports/shm/heap.h), where an all_reduce also
// writes, or in ordinary memory of other processes, which the kernel reads for us
// (transports/shm/cma.h) where that beats the two copies through staging.
//
// Callers have completed the first stage, so all inputs are there; each function ends when all
// ranks are done with each other's memory. Results have the same bits as those through staging: an
// element has one owner, which folds in rank order.
//
// A rank that is stopped in the middle may continue after the others have given up. What it reads
// then is discarded, since Window::end() throws; what it writes reaches no rank, since a rank that
// gives up reclaims its buffer first (SharedHeap::take_back).
namespace in_place {

// Sizes from which reading beats staging, measured on two cores with both ways in turn (float32, 64
// KiB to 64 MiB, time of staging divided by that of reading). Two ranks: 0.4 to 1.04 below, 1.01 to
// 2.5 from here on; an all_reduce, which reads what the other core has just written, 0.63 to 0.68
// up to 1 MiB, 0.84 to 0.89 at 2 MiB, 1.18 to 1.30 at 4 MiB. Three and four ranks, more than cores:
// from run to run 0.67 to 1.8, so they stay in staging but for two: reduce_scatter (1.16 to 1.9
// from here on) and parts (all_to_all 1.0 to 1.4; scatter and gather mostly above 1, gather of
// three ranks 0.8 to 1.1).
constexpr size_t kNever = SIZE_MAX;
constexpr size_t all_reduce_from(int ranks) { return ranks == 2 ? size_t{3} << 20 : kNever; }
/// Returns the bytes of all parts from which a reduce_scatter reads.
constexpr size_t reduce_scatter_from(int ranks) { return size_t{ranks == 2 ? 512u : 16384u} << 10; }
/// Returns the bytes of a part from which an all_gather reads.
constexpr size_t all_gather_from(int ranks) { return ranks == 2 ? size_t{256} << 10 : kNever; }
constexpr size_t broadcast_from(int ranks) { return ranks == 2 ? size_t{512} << 10 : kNever; }
/// Bytes of a part of all_to_all, gather and scatter, with any number of ranks.
constexpr size_t kPartFrom = size_t{256} << 10;

/// Bytes that are folded before they are copied to all others: they are still in the first-level
/// cache then.
constexpr size_t kStep = size_t{16} << 10;

/// Returns the chunk of the buffer that each rank folds.
Slicing chunks_of(const Window& window, size_t bytes) {
  const size_t unit = kGrain * window.size();
  return {bytes, (bytes + unit - 1) / unit * kGrain};
}

/// Reads the same range of all other ranks piece by piece and folds it. Pieces go through our
/// staging memory, which no rank reads since the first stage is complete, and stay in cache.
class PeerReducer {
 public:
  PeerReducer(Window& window, Reducer& reducer, const Places& in)
      : window_(window), reducer_(reducer), in_(in) {
    const auto others = static_cast<size_t>(std::max(1, window.size() - 1));
    piece_ = std::min(kSlotBytes, kStagingBytes / others / kGrain * kGrain);
  }

  /// The range is `bytes` at `offset` of all peers' data, at `own` of ours.
  void run(size_t offset, const void* own, size_t bytes, void* out) {
    const int me = window_.rank();
    const Slicing cut{bytes, piece_};
    for (size_t i = 0; i < cut.count(); i++) {
      for (int k = 1; k < window_.size(); k++) {
        in_.read(window_.peer(k), offset + cut.begin(i), scratch(k), cut.size(i));
      }
      reducer_.run(
          at(own, cut.begin(i)),
          [&](int r) { return scratch(r > me ? r - me : r - me + window_.size()); }, cut.size(i),
          at(out, cut.begin(i)));
    }
  }

 private:
  /// Staging memory for the k-th rank after us.
  uint8_t* scratch(int k) const { return window_.staging(window_.rank(), 0) + (k - 1) * piece_; }

  Window& window_;
  Reducer& reducer_;
  const Places& in_;
  size_t piece_;
};

/// Reduces `bytes` at `offset` of all ranks' data, at `own` of ours.
void reduce_range(Window& window, Reducer& reducer, const Places& in, size_t offset,
                  const void* own, size_t bytes, void* out) {
  if (!in.in_heaps()) return PeerReducer(window, reducer, in).run(offset, own, bytes, out);
  reducer.run(own, [&](int r) { return in[r] + offset; }, bytes, out);
}

// Every rank writes its own memory alone. The whole chunk is read at once: blocks of 128 KiB to 2
// MiB, read by the others while they are in cache, were slower from 16 MiB on (at 64 MiB by up to
// 2.3) and no faster by more than noise below, since ranks then wait for each other more often.
void all_reduce_by_reading(Window& window, Reducer& reducer, const Places& data, void* own,
                           size_t bytes) {
  const int me = window.rank();
  const Slicing chunks = chunks_of(window, bytes);
  uint8_t* mine = at(own, chunks.begin(me));
  reduce_range(window, reducer, data, chunks.begin(me), mine, chunks.size(me), mine);
  barrier(window);
  for (int k = 1; k < window.size(); k++) {
    const int rank = window.peer(k);
    data.read(rank, chunks.begin(rank), at(own, chunks.begin(rank)), chunks.size(rank));
  }
  barrier(window);
}

/// Reduces the `bytes` of all ranks in place; ours are at `own`.
void all_reduce(Window& window, Reducer& reducer, const Places& data, void* own, size_t bytes) {
  if (!data.in_heaps()) return all_reduce_by_reading(window, reducer, data, own, bytes);
  const int me = window.rank(), ranks = window.size();
  const Slicing chunks = chunks_of(window, bytes);
  const size_t begin = chunks.begin(me), end = chunks.begin(me + 1);
  for (size_t i = begin; i < end; i += kStep) {
    const size_t size = std::min(kStep, end - i);
    uint8_t* mine = data[me] + i;
    uint8_t* next = ranks > 1 ? data[window.peer(1)] + i : nullptr;
    reducer.run(mine, [&](int r) { return data[r] + i; }, size, mine, next);
    for (int k = 2; k < ranks; k++) std::memcpy(data[window.peer(k)] + i, mine, size);
  }
  barrier(window);
}

/// Reduces our part of all ranks' data, which lies at `offset` there; of our own data it is `own`.
void reduce_scatter(Window& window, Reducer& reducer, const Places& in, Span<const uint8_t> own,
                    size_t offset, void* out) {
  reduce_range(window, reducer, in, offset, own.data, own.size, out);
  barrier(window);
}

/// Gathers each rank's `in`, which has the size of its part of `out`; ours is at `own`.
void all_gather(Window& window, const Places& in, const void* own, const Parts& out) {
  for (int k = 1; k < window.size(); k++) {
    const int rank = window.peer(k);
    in.read(rank, 0, out[rank].data, out.bytes(rank));
  }
  copy_bytes(out[window.rank()].data, own, out.bytes(window.rank()));
  barrier(window);
}

/// Copies the root's data, which lie at `place`.
void broadcast(Window& window, int root, uint64_t place, void* data, size_t bytes) {
  if (window.rank() != root) window.read(root, place, 0, data, bytes);
  barrier(window);
}

}  // namespace in_place

// ------------------------------------------------------------------ through staging

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
      [&](const Places& places) { in_place::all_reduce(window, reducer, places, out, bytes); });
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
      return in_place::all_reduce(window_, reducer_, places, out_, cut_.total);
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

/// All-reduce and reduce.
void reduce(Window& window, const Collective& call) {
  Reducer reducer(window, call);
  const int root = call.root;
  const bool here = root < 0 || window.rank() == root;
  const void* in = call.in.data();
  void* out = here ? call.out.data() : nullptr;
  const size_t bytes = call.in.bytes(0);
  Shown shown;
  if (root < 0) shown = {in, bytes, in_place::all_reduce_from(window.size()), true};
  if (bytes == 0) {
    barrier(window);
  } else if (bytes <= kTinyBytes) {
    tiny(window, reducer, in, out, bytes);
  } else if (bytes <= one_shot_limit(window.size()) || (root >= 0 && window.size() == 2)) {
    one_shot(window, reducer, in, out, bytes, shown);
  } else {
    TwoShot(window, reducer, in, out, bytes, root).run(shown);
  }
}

void reduce_scatter(Window& window, const Collective& call) {
  Reducer reducer(window, call);
  const ConstParts& parts = call.in;
  void* out = call.out.data();
  const int me = window.rank();
  const Areas areas(window);
  const PartCuts<const void> cuts{parts, window.size(), areas.each};
  Shown shown;
  if (parts.is_aligned()) {
    int first = 0;
    while (first + 1 < window.size() && parts.bytes(first) == 0) first++;
    shown = {parts[first].data, parts.total(window.size()) * size_of(call.dtype),
             in_place::reduce_scatter_from(window.size())};
    if (shown.bytes < kInPlaceBytes * static_cast<size_t>(window.size())) shown = {};
  }
  rounds(
      window, shown, cuts.count(),
      [&](size_t i, uint8_t* staging) {
        for (int k = 1; k < window.size(); k++) {
          const int rank = window.peer(k);
          const Span<const uint8_t> theirs = cuts.of(rank, i);
          copy_bytes(staging + areas.offset(me, rank), theirs.data, theirs.size);
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
        const size_t offset =
            parts.bytes(me) > 0 ? static_cast<size_t>(parts[me].data - at(shown.data, 0)) : 0;
        in_place::reduce_scatter(window, reducer, places, parts[me], offset, out);
      });
}

// ------------------------------------------------------------------ what only moves bytes

/// Header of what a rank sends another in one call; the sender writes it at the end of its first
/// slot.
struct SlotHeader {
  uint64_t bytes;
  uint64_t place;  ///< of the part if it is read directly, or 0
};

/// Values that a rank publishes to all, beside the flag of that slot.
struct Availability {
  uint64_t rounds;
  uint64_t in_place;  ///< 1 if peers read its data in place
};

[[noreturn]] void throw_sizes(const Window& window, const OpTag& tag, int from, uint64_t sent,
                              uint64_t expected) {
  OpTag theirs = tag, ours = tag;
  theirs.numel = sent / size_of(tag.dtype);
  ours.numel = expected / size_of(tag.dtype);
  throw WireMismatch(window.name(window.rank()) + " expects " + std::to_string(expected) +
                     " bytes of " + describe(ours) + " while " + window.name(from) + " sends " +
                     std::to_string(sent) + " bytes of " + describe(theirs));
}

/// Exchange of parts: every rank sends every other a part of a size that only these two know; in a
/// gather only one rank gets anything.
class PartExchange {
 public:
  PartExchange(Window& window, const OpTag& tag, const ConstParts& in, const Parts& out)
      : window_(window),
        tag_(tag),
        in_(in),
        out_(out),
        me_(window.rank()),
        areas_(window, kSlotBytes - slot_headers_bytes(), tag.op == Op::gather) {
    size_t most = 0;
    for (int r = 0; r < window.size(); r++) {
      if (r == me_) continue;
      place_[r] = Shown{in_[r].data, in_.bytes(r), in_place::kPartFrom}.place(window);
      availability_.in_place |= place_[r] != 0;
      if (staged(r)) most = std::max(most, in_.bytes(r));
    }
    availability_.rounds = std::max<size_t>(1, Slicing{most, areas_.each}.count());
  }

  void run() {
    const uint32_t round = window_.claim(1);
    uint8_t* staging = window_.staging(me_, round);
    for (int r = 0; r < window_.size(); r++) {
      if (r != me_) slot_headers(staging)[r] = {in_.bytes(r), place_[r]};
    }
    put(0, staging);
    std::memcpy(window_.payload(), &availability_, sizeof availability_);
    const uint32_t stage = window_.post();
    window_.wait(stage);
    const Availability all = read_slot_headers(round, stage);
    window_.claim(all.rounds - 1);
    more_rounds(
        window_, round, all.rounds, [&](size_t i, uint8_t* place) { put(i, place); },
        [&](size_t i, uint32_t later) { take(i, later); });
    for (int k = 1; k < window_.size(); k++) {
      const int rank = window_.peer(k);
      if (from_[rank].place) {
        window_.read(rank, from_[rank].place, 0, out_[rank].data, out_.bytes(rank));
      }
    }
    copy_bytes(out_[me_].data, in_[me_].data, in_.bytes(me_));
    if (all.in_place) barrier(window_);
  }

 private:
  /// True if our part for this rank goes through staging.
  bool staged(int rank) const { return in_.bytes(rank) > 0 && place_[rank] == 0; }
  size_t slot_headers_bytes() const {
    return (window_.size() * sizeof(SlotHeader) + kGrain - 1) / kGrain * kGrain;
  }
  SlotHeader* slot_headers(uint8_t* staging) const {
    return reinterpret_cast<SlotHeader*>(staging + kSlotBytes - slot_headers_bytes());
  }

  /// Returns the combined availability of all ranks.
  Availability read_slot_headers(uint32_t round, uint32_t stage) {
    Availability all = availability_;
    for (int r = 0; r < window_.size(); r++) {
      if (r == me_) continue;
      Availability theirs;
      std::memcpy(&theirs, window_.payload(r, stage), sizeof theirs);
      all.rounds = std::max(all.rounds, theirs.rounds);
      all.in_place |= theirs.in_place;
      from_[r] = slot_headers(window_.staging(r, round))[me_];
      if (from_[r].bytes != out_.bytes(r)) {
        throw_sizes(window_, tag_, r, from_[r].bytes, out_.bytes(r));
      }
    }
    return all;
  }

  void put(size_t i, uint8_t* staging) {
    for (int k = 1; k < window_.size(); k++) {
      const int rank = window_.peer(k);
      if (!staged(rank)) continue;
      const Span<const uint8_t> piece = Slicing{in_.bytes(rank), areas_.each}.of(in_[rank], i);
      copy_bytes(staging + areas_.offset(me_, rank), piece.data, piece.size);
      window_.count_sent(piece.size);
    }
  }
  void take(size_t i, uint32_t round) {
    for (int k = 1; k < window_.size(); k++) {
      const int rank = window_.peer(k);
      if (from_[rank].place) continue;
      const Span<uint8_t> piece = Slicing{out_.bytes(rank), areas_.each}.of(out_[rank], i);
      copy_bytes(piece.data, window_.staging(rank, round) + areas_.offset(rank, me_), piece.size);
    }
  }

  Window& window_;
  const OpTag& tag_;
  const ConstParts in_;
  const Parts out_;
  int me_;
  const Areas areas_;
  Availability availability_ = {};
  uint64_t place_[kMaxRanks];  ///< of our part for each rank
  SlotHeader from_[kMaxRanks];
};

/// Only the root's data matter: if they lie in its heap, all ranks copy from there.
void broadcast(Window& window, int root, void* data, size_t bytes) {
  if (bytes == 0) return barrier(window);
  const Slicing cut{bytes, kSlotBytes};
  const bool is_root = window.rank() == root;
  const uint32_t round = window.claim(cut.count());
  const auto put = [&](size_t i, uint8_t* staging) {
    if (!is_root) return;
    std::memcpy(staging, at(data, cut.begin(i)), cut.size(i));
    window.count_sent(cut.size(i));
  };
  const Shown shown{data, bytes, in_place::broadcast_from(window.size())};
  uint64_t place = is_root ? shown.place(window) : 0;
  if (!place) put(0, window.staging(window.rank(), round));
  std::memcpy(window.payload(), &place, sizeof place);
  const uint32_t stage = window.post();
  window.wait(stage);
  if (!is_root) std::memcpy(&place, window.payload(root, stage), sizeof place);
  if (place) return in_place::broadcast(window, root, place, data, bytes);
  more_rounds(window, round, cut.count(), put, [&](size_t i, uint32_t from) {
    if (!is_root) {
      std::memcpy(at(data, cut.begin(i)), window.staging(root, from), cut.size(i));
    }
  });
}

void all_gather(Window& window, const Collective& call) {
  const void* in = call.in.data();
  const Parts& parts = call.out;
  const int me = window.rank();
  const PartCuts<void> cuts{parts, window.size(), kSlotBytes};
  rounds(
      window, {in, parts.bytes(me), in_place::all_gather_from(window.size())}, cuts.count(),
      [&](size_t i, uint8_t* staging) {
        const Span<uint8_t> own = cuts.of(me, i);
        const uint8_t* from = at(in, i * kSlotBytes);
        copy_bytes(staging, from, own.size);
        window.count_sent(own.size);
        copy_bytes(own.data, from, own.size);
      },
      [&](size_t i, uint32_t round) {
        for (int k = 1; k < window.size(); k++) {
          const int rank = window.peer(k);
          const Span<uint8_t> theirs = cuts.of(rank, i);
          copy_bytes(theirs.data, window.staging(rank, round), theirs.size);
        }
      },
      [&](const Places& places) { in_place::all_gather(window, places, in, parts); });
}

/// All_to_all, gather and scatter: in the latter two all parts but those of the root are empty.
void exchange(Window& window, const OpTag& tag, const Collective& call) {
  const size_t element = size_of(call.dtype), ranks = window.size();
  const bool gathers = call.op == Op::gather, scatters = call.op == Op::scatter;
  const bool at_root = window.rank() == call.root;
  std::vector<ConstPart> to(ranks);
  std::vector<Part> from(ranks);
  if (gathers) to[call.root] = {call.in.data(), call.in.numel(0)};
  if (scatters) from[call.root] = {call.out.data(), call.out.numel(0)};
  const bool sends_parts = !gathers && (!scatters || at_root);
  const bool takes_parts = !scatters && (!gathers || at_root);
  PartExchange(window, tag, sends_parts ? call.in : ConstParts(to).of(element),
               takes_parts ? call.out : Parts(from).of(element))
      .run();
}

}  // namespace

void run(Window& window, const OpTag& tag, const Collective& call, Deadline deadline) {
  window.begin(tag, deadline);
  switch (call.op) {
    case Op::all_reduce:
    case Op::reduce:
      reduce(window, call);
      break;
    case Op::reduce_scatter:
      reduce_scatter(window, call);
      break;
    case Op::all_gather:
      all_gather(window, call);
      break;
    case Op::broadcast:
      broadcast(window, call.root, call.out.data(), call.out.bytes(0));
      break;
    case Op::barrier:
      barrier(window);
      break;
    default:
      exchange(window, tag, call);
  }
  window.end();
}

}  // namespace pycomm::shared
