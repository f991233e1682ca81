// What kernels of different ranks know of each other: where each shows its data, where it is told
// how far the others are, and the page that kernels share with their host. Plain memory, zero when
// it is made; how it is got is said in peer_workspace.h, how it is used in
// collectives/device_meet.h.
#pragma once
#include "core/types.h"

namespace pycomm::device {

/// The ranks of one host.
constexpr int kMaxPeers = 16;
/// Thread blocks of a kernel. Block b of one rank works with block b of the others, no other.
constexpr int kMaxBlocks = 64;

/// Of one rank, written by its peers: word [b][p] says to which meeting block b of rank p has come,
/// and in its upper half what p does there (a hash). The words of a block are one line.
struct alignas(128) Flags {
  uint64_t came[kMaxBlocks][kMaxPeers];
};

/// Of one rank, for its own kernels alone.
struct Progress {
  uint32_t meeting[kMaxBlocks];  ///< the last that each block had; it counts on, past 2^32 too
  uint32_t broken;               ///< a block has given up: whatever starts later ends at once
};

/// Why a block gave up, in one word, so that it is read whole: 0 is no complaint.
struct Complaint {
  enum Kind : uint32_t { kNone, kLate, kMismatch };
  static constexpr int kKindBits = 2, kPhaseBits = 22, kSeqBits = 40;

  Kind kind;
  uint32_t phase;  ///< which meeting of the operation, from 1
  uint64_t seq;    ///< number of the operation

  PYCOMM_HD uint64_t word() const {
    constexpr uint32_t kLast = (1u << kPhaseBits) - 1;
    const uint64_t place = phase < kLast ? phase : kLast;
    return seq << (kKindBits + kPhaseBits) | place << kKindBits | kind;
  }
  static Complaint of(uint64_t word) {
    return {static_cast<Kind>(word & ((1u << kKindBits) - 1)),
            static_cast<uint32_t>(word >> kKindBits) & ((1u << kPhaseBits) - 1),
            word >> (kKindBits + kPhaseBits)};
  }
};

/// Of one rank, in host memory that its kernels reach too.
struct alignas(4096) Control {
  enum Abort : uint32_t { kNone, kWriting, kAborted };
  uint32_t abort;                  ///< set by the host of any rank; kernels that wait look at it
  int32_t abort_rank;              ///< who
  char reason[1024];               ///< why
  uint32_t left;                   ///< 1: this rank is done with the memory of the others
  uint64_t complaints[kMaxPeers];  ///< by our kernels, about each rank
};

/// Passed to kernels by value.
struct PeerPointers {
  uint8_t* data[kMaxPeers];  ///< what each rank shows; equal sizes
  Flags* flags[kMaxPeers];
  Progress* progress;
  Control* control;
  int rank, ranks;
};

}  // namespace pycomm::device
