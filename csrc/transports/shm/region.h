// Shared region: memory that the ranks of one host share, and which rank writes which line.
//
//   Header | RankSlot of each rank | staging of each rank | Ring of each ordered pair and lane
//   and behind it, where address space permits: the heap of each rank (shm/heap.h)
//
// A region starts as zero pages and is valid as such; pages that no rank touches cost nothing. It
// depends neither on how the memory was made (shm.cpp) nor on its
// use (window.h, ring_channel.h, shm/failure_detector.h). Ranks are numbered here by their place
// among those who share it.
#pragma once
#include <sched.h>

#include <cstring>

#include "core/rank_state.h"
#include "transports/shm/futex.h"
#include "transports/transport.h"

namespace pycomm {

/// Cache lines are fetched in pairs, so lines that different ranks write lie 128 bytes apart.
constexpr size_t kLine = 128;
/// The payload beside a flag, in the same pair of cache lines.
constexpr size_t kTinyBytes = 120;
/// Staging of one rank: a few slots, small enough that they stay in L2.
constexpr size_t kSlots = 4;
constexpr size_t kSlotBytes = size_t{128} << 10;
constexpr size_t kStagingBytes = kSlots * kSlotBytes;
/// More ranks than this on one host use TCP.
constexpr int kMaxRanks = 256;
/// The parts of a region begin at multiples of this: of a page, where pages are small.
constexpr size_t kPart = 4096;
/// The heaps and the parts of files that are mapped begin at multiples of the largest page.
constexpr size_t kLargestPage = size_t{64} << 10;
constexpr size_t kRingBytes = size_t{256} << 10;
/// The size of a heap is address space, not memory: pages cost when they are touched.
#if defined(__SANITIZE_THREAD__)  // leaves little of it
constexpr size_t kHeapBytes = size_t{4} << 30;
#else
constexpr size_t kHeapBytes = size_t{64} << 30;
#endif

/// A stage flag. Low half: number of the stage that is done. High half: hash of the tag it belongs
/// to.
struct alignas(kLine) Flag {
  std::atomic<uint64_t> value;
  uint8_t payload[kTinyBytes];
};
static_assert(sizeof(Flag) == kLine, "flag and payload are fetched together");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "wire formats are little-endian");

/// The state that one rank publishes to the others. Only this rank writes here, except where noted.
struct RankSlot {
  Flag flags[2];                   ///< the last two stages; readers sleep on Doorbell `posted`
  alignas(kLine) Doorbell posted;  ///< sleepers mark it
  alignas(kLine) Doorbell moved[kLanes];  ///< rung by peers when one of our channels can proceed
  alignas(kLine) SharedRankState rank_state;  ///< read in long waits and for error texts
  alignas(kLine) std::atomic<uint32_t> left;  ///< 1 after a close
  uint32_t heap;                              ///< 1 if the rank has mapped the heaps
  uint64_t process[2];                        ///< names the process on this host
  uint64_t birth;                             ///< process_birth()
  uint64_t address;                           ///< of this rank slot in that process
  std::atomic<uint32_t> reads;  ///< 1 if the rank can read all others' memory (shm/cma.h)
  cpu_set_t cpus;               ///< the CPUs on which the rank may run
};

struct Ring {
  alignas(kLine) std::atomic<uint64_t> head;  ///< bytes written, by the sender
  alignas(kLine) std::atomic<uint64_t> tail;  ///< bytes read, by the receiver
  alignas(kPart) uint8_t data[kRingBytes];
};

struct alignas(kPart) Header {
  /// The progress of writing an abort's notice. The bits above hold the place of the rank that
  /// writes it.
  enum Abort : uint32_t { kNone, kWriting, kAborted, kStep = 4 };
  std::atomic<uint32_t> abort;
  uint8_t notice[Notice::kBytes];  ///< encoded
  /// 1 if ranks must name who may read them (cma.h), as the rank that made the region has
  /// found.
  uint32_t permits;
};

inline size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
/// Returns the page size of the running kernel.
size_t page_size();
/// Keeps a mapping that ranks share out of core dumps: heaps are huge and sparse, and reading
/// untouched pages would fill the host's memory.
void keep_out_of_dumps(void* memory, size_t bytes) noexcept;

class SharedRegion {
 public:
  static size_t bytes(int ranks);
  /// Returns the size including the heaps.
  static size_t bytes_with_heaps(int ranks) {
    return bytes(ranks) + static_cast<size_t>(ranks) * kHeapBytes;
  }

  SharedRegion(void* base, int ranks) : base_(static_cast<uint8_t*>(base)), ranks_(ranks) {}

  int ranks() const { return ranks_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankSlot& rank_slot(int rank) const {
    return reinterpret_cast<RankSlot*>(base_ + sizeof(Header))[rank];
  }
  /// True once the rank has signed its slot.
  bool present(int rank) const { return rank_slot(rank).process[0] != 0; }
  uint8_t* staging(int rank) const;
  /// Returns the heap of a rank, once all have one (has_heaps()).
  uint8_t* heap(int rank) const {
    return base_ + bytes(ranks_) + static_cast<size_t>(rank) * kHeapBytes;
  }
  /// True if all ranks have mapped the heaps.
  bool has_heaps() const {
    bool all = true;
    for (int r = 0; r < ranks_; r++) all = all && rank_slot(r).heap != 0;
    return all;
  }
  Ring& ring(int from, int to, Lane lane) const;
  /// Returns the number of CPUs that the ranks have together.
  int cpus() const;

 private:
  uint8_t* base_;
  int ranks_;
};

}  // namespace pycomm
