// Collectives over a Window that only move bytes.
#include "collectives/window/cma_read.h"
#include "collectives/window/in_place.h"
#include "collectives/window/shared.h"
#include "core/error.h"

namespace pycomm::shared {
namespace {

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
      place_[r] = same ? 0 : Shown{in_[r].data, in_.bytes(r), cma_read::kPartFrom}.place(window);
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
    copy(out_[me_].data, in_[me_].data, in_.bytes(me_));
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
      copy(staging, piece.data, piece.size);
      staging += area_;
      window_.count_sent(piece.size);
    }
  }
  void take(size_t i, uint32_t round) {
    for (int k = 1; k < window_.size(); k++) {
      const int rank = window_.peer(k);
      if (from_[rank].place) continue;
      const Span<uint8_t> piece = Slicing{out_.bytes(rank), from_[rank].area}.of(out_[rank], i);
      copy(piece.data, window_.staging(rank, round) + from_[rank].offset, piece.size);
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
void broadcast_bytes(Window& window, int root, void* data, size_t bytes) {
  const Slicing cut{bytes, kSlotBytes};
  const bool is_root = window.rank() == root;
  const uint32_t round = window.claim(cut.count());
  const auto put = [&](size_t i, uint8_t* staging) {
    if (!is_root) return;
    std::memcpy(staging, at(data, cut.begin(i)), cut.size(i));
    window.count_sent(cut.size(i));
  };
  const Shown shown{data, bytes, cma_read::broadcast_from(window.size())};
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

}  // namespace

void all_gather(Window& window, const OpTag& tag, const void* in, const Parts& out,
                Deadline deadline) {
  window.begin(tag, deadline);
  const Parts parts = out.of(size_of(tag.dtype));
  const int me = window.rank();
  const PartCuts<void> cuts{parts, window.size(), kSlotBytes};
  rounds(
      window, {in, parts.bytes(me), cma_read::all_gather_from(window.size())}, cuts.count(),
      [&](size_t i, uint8_t* staging) {
        const Span<uint8_t> own = cuts.of(me, i);
        const uint8_t* from = at(in, i * kSlotBytes);
        copy(staging, from, own.size);
        window.count_sent(own.size);
        copy(own.data, from, own.size);
      },
      [&](size_t i, uint32_t round) {
        for (int k = 1; k < window.size(); k++) {
          const int rank = window.peer(k);
          const Span<uint8_t> theirs = cuts.of(rank, i);
          copy(theirs.data, window.staging(rank, round), theirs.size);
        }
      },
      [&](const Places& places) { in_place::all_gather(window, places, in, parts); });
  window.end();
}

void all_to_all(Window& window, const OpTag& tag, const ConstParts& in, const Parts& out,
                Deadline deadline) {
  window.begin(tag, deadline);
  const size_t element = size_of(tag.dtype);
  PartExchange(window, tag, in.of(element), out.of(element)).run();
  window.end();
}

void gather(Window& window, const OpTag& tag, const void* in, const Parts& out, Deadline deadline) {
  window.begin(tag, deadline);
  const size_t element = size_of(tag.dtype);
  std::vector<ConstPart> to(window.size());
  to[tag.root] = {in, tag.numel};
  const std::vector<Part> none(window.size());
  const Parts from = window.rank() == tag.root ? out : Parts(none);
  PartExchange(window, tag, ConstParts(to).of(element), from.of(element)).run();
  window.end();
}

void scatter(Window& window, const OpTag& tag, const ConstParts& in, void* out, Deadline deadline) {
  window.begin(tag, deadline);
  const size_t element = size_of(tag.dtype);
  std::vector<Part> from(window.size());
  from[tag.root] = {out, tag.numel};
  const std::vector<ConstPart> none(window.size());
  const ConstParts to = window.rank() == tag.root ? in : ConstParts(none);
  PartExchange(window, tag, to.of(element), Parts(from).of(element)).run();
  window.end();
}

void broadcast(Window& window, const OpTag& tag, void* data, Deadline deadline) {
  window.begin(tag, deadline);
  const size_t bytes = tag.numel * size_of(tag.dtype);
  if (bytes == 0) {
    barrier(window);
  } else {
    broadcast_bytes(window, tag.root, data, bytes);
  }
  window.end();
}

void barrier(Window& window, const OpTag& tag, Deadline deadline) {
  window.begin(tag, deadline);
  barrier(window);
  window.end();
}

}  // namespace pycomm::shared
