// Memory that the ranks of one host share: who writes which line.
//
//   Header | Board of each rank | staging of each rank | Ring of each ordered pair and lane
//   and behind it, where address space permits: the heap of each rank (shared_heap.h)
//
// A segment starts as zero pages and is valid as such; pages that nobody touches cost nothing. It
// knows neither how the memory was got (local.cpp: one process; shm.cpp: memfd) nor what ranks do
// with it (window.h, ring_channel.h, watch.h). Ranks are numbered here by their place among those
// who share it.
#pragma once
#include <sched.h>

#include <cstring>

#include "core/standing.h"
#include "transports/futex.h"
#include "transports/transport.h"

namespace pycomm {

/// Lines are fetched in pairs, so what different ranks write lies 128 bytes apart.
constexpr size_t kLine = 128;
/// What travels beside its flag, in the same pair of cache lines.
constexpr size_t kTinyBytes = 120;
/// Staging of one rank: a few slots, small enough that they stay in L2.
constexpr size_t kSlots = 4;
constexpr size_t kSlotBytes = size_t{128} << 10;
constexpr size_t kStagingBytes = kSlots * kSlotBytes;
/// More ranks than this on one host go by TCP.
constexpr int kMaxRanks = 256;
constexpr size_t kRingBytes = size_t{256} << 10;
/// Addresses, not memory: pages of a heap cost when they are touched.
constexpr size_t kHeapBytes = size_t{64} << 30;

/// Low half: number of the stage that is done. High half: hash of the tag it belongs to.
struct alignas(kLine) Flag {
  std::atomic<uint64_t> value;
  uint8_t payload[kTinyBytes];
};
static_assert(sizeof(Flag) == kLine, "flag and payload are fetched together");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "wire formats are little-endian");

/// What one rank shows to the others. Only this rank writes here, except where noted.
struct Board {
  Flag flags[2];                           ///< the last two stages; readers sleep on Bell `posted`
  alignas(kLine) Bell posted;              ///< whoever sleeps marks it
  alignas(kLine) Bell moved[kLanes];       ///< rung by peers when one of our channels can go on
  alignas(kLine) SharedStanding standing;  ///< read in long waits and for the texts of errors
  alignas(kLine) std::atomic<uint32_t> left;  ///< 1 after a graceful leave
  uint32_t heaps;                             ///< 1 if the rank has mapped the heaps too
  uint64_t process[2];                        ///< names the process on this host
  uint64_t address;                           ///< of this board in that process
  std::atomic<uint32_t> reads;  ///< 1 if the rank can read all others' memory (peer_memory.h)
  cpu_set_t cpus;               ///< where the rank may run
};

struct Ring {
  alignas(kLine) std::atomic<uint64_t> head;  ///< bytes written, by the sender
  alignas(kLine) std::atomic<uint64_t> tail;  ///< bytes read, by the receiver
  alignas(4096) uint8_t data[kRingBytes];
};

struct alignas(4096) Header {
  enum Abort : uint32_t { kNone, kWriting, kAborted };
  std::atomic<uint32_t> abort;
  int32_t abort_rank;  ///< in the group
  char abort_reason[1024];
  /// Threads of one process: how many still hold the segment, and what is to be unmapped then.
  std::atomic<int32_t> holders;
  size_t mapped_bytes;
};

class Segment {
 public:
  static size_t bytes(int ranks);
  /// With the heaps.
  static size_t bytes_with_heaps(int ranks) {
    return bytes(ranks) + static_cast<size_t>(ranks) * kHeapBytes;
  }

  Segment(void* base, int ranks) : base_(static_cast<uint8_t*>(base)), ranks_(ranks) {}

  int ranks() const { return ranks_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Board& board(int rank) const { return reinterpret_cast<Board*>(base_ + sizeof(Header))[rank]; }
  /// True once the rank has signed its board.
  bool present(int rank) const { return board(rank).process[0] != 0; }
  uint8_t* staging(int rank) const;
  uint8_t* heap(int rank) const { return base_ + bytes(ranks_) + rank * kHeapBytes; }
  /// True if all ranks have mapped the heaps.
  bool has_heaps() const {
    bool all = true;
    for (int r = 0; r < ranks_; r++) all = all && board(r).heaps != 0;
    return all;
  }
  Ring& ring(int from, int to, Lane lane) const;
  /// CPUs that the ranks have together.
  int cpus() const;

 private:
  uint8_t* base_;
  int ranks_;
};

}  // namespace pycomm
