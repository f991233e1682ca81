#include "collectives/window/shared.h"

#include "collectives/window/in_place.h"
#include "core/error.h"

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
  uint64_t place;   ///< of the part if it is read directly, or 0
  uint32_t offset;  ///< of the part in the slot otherwise
  uint32_t area;    ///< bytes per round
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

/// Exchange of parts: every rank sends every other a part of a size that only these two know. A
/// sender's slots are divided among the ranks to which it sends anything.
class PartExchange {
 public:
  PartExchange(Window& window, const OpTag& tag, const ConstParts& in, const Parts& out)
      : window_(window), tag_(tag), in_(in), out_(out), me_(window.rank()) {
    size_t readers = 0, most = 0;
    for (int r = 0; r < window.size(); r++) {
      if (r == me_) continue;
      // Only with staging can a part be received where another is sent from.
      const bool same = in_[r].data == out_[r].data;
      place_[r] = same ? 0 : Shown{in_[r].data, in_.bytes(r), in_place::kPartFrom}.place(window);
      availability_.in_place |= place_[r] != 0;
      if (!staged(r)) continue;
      readers += 1;
      most = std::max(most, in_.bytes(r));
    }
    area_ = (kSlotBytes - slot_headers_bytes()) / std::max<size_t>(1, readers) / kGrain * kGrain;
    availability_.rounds = std::max<size_t>(1, Slicing{most, area_}.count());
  }

  void run() {
    const uint32_t round = window_.claim(1);
    uint8_t* staging = window_.staging(me_, round);
    write_letters(staging);
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

  void write_letters(uint8_t* staging) const {
    uint32_t offset = 0;
    for (int k = 1; k < window_.size(); k++) {
      const int rank = window_.peer(k);
      slot_headers(staging)[rank] = {in_.bytes(rank), place_[rank], offset,
                                     static_cast<uint32_t>(area_)};
      if (staged(rank)) offset += static_cast<uint32_t>(area_);
    }
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
      const Span<const uint8_t> piece = Slicing{in_.bytes(rank), area_}.of(in_[rank], i);
      copy_bytes(staging, piece.data, piece.size);
      staging += area_;
      window_.count_sent(piece.size);
    }
  }
  void take(size_t i, uint32_t round) {
    for (int k = 1; k < window_.size(); k++) {
      const int rank = window_.peer(k);
      if (from_[rank].place) continue;
      const Span<uint8_t> piece = Slicing{out_.bytes(rank), from_[rank].area}.of(out_[rank], i);
      copy_bytes(piece.data, window_.staging(rank, round) + from_[rank].offset, piece.size);
    }
  }

  Window& window_;
  const OpTag& tag_;
  const ConstParts in_;
  const Parts out_;
  int me_;
  size_t area_;
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
