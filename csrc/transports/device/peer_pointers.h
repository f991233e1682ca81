// Peer pointers: memory that kernels of different ranks share, namely each rank's data, the flags
// that tell how far its peers are, and the page that kernels share with their host. It is plain
// memory, zero when it is made; peer_workspace.h makes it, and collectives/device/barrier.h uses
// it.
#pragma once
#include "core/types.h"

namespace pycomm::device {

/// The most ranks of one host.
constexpr int kMaxPeers = 16;
/// The most thread blocks of a kernel. Block b of one rank works with block b of the others, no
/// other.
constexpr int kMaxBlocks = 64;

/// Notice::kBytes, whose header kernels do not need.
constexpr size_t kNoticeBytes = 1000;

/// Arrival flags of one rank, written by its peers: word [b][p] holds the number of the barrier
/// that block b of rank p has reached, and in its upper half a hash of what p does there. The words
/// of a block are one line.
struct alignas(128) Flags {
  uint64_t arrived[kMaxBlocks][kMaxPeers];
};

/// The progress of one rank, used by its own kernels alone.
struct Progress {
  uint32_t barriers[kMaxBlocks];  ///< the last barrier of each block; it counts on, past 2^32 too
  uint32_t broken;                ///< a block has given up: kernels that start later end at once
};

/// Why a block gave up, in one word, so that it is read whole: 0 means no error.
struct KernelError {
  enum Kind : uint32_t { kNone, kLate, kMismatch };
  static constexpr int kKindBits = 2, kPhaseBits = 22, kSeqBits = 40;

  Kind kind;
  uint32_t phase;  ///< which barrier of the operation, from 1
  uint64_t seq;    ///< number of the operation

  PYCOMM_HD uint64_t word() const {
    constexpr uint32_t kLast = (1u << kPhaseBits) - 1;
    const uint64_t place = phase < kLast ? phase : kLast;
    return seq << (kKindBits + kPhaseBits) | place << kKindBits | kind;
  }
  static KernelError of(uint64_t word) {
    return {static_cast<Kind>(word & ((1u << kKindBits) - 1)),
            static_cast<uint32_t>(word >> kKindBits) & ((1u << kPhaseBits) - 1),
            word >> (kKindBits + kPhaseBits)};
  }
};

/// The control page of one rank, in host memory that its kernels reach too.
struct alignas(4096) ControlPage {
  enum Abort : uint32_t { kNone, kWriting, kAborted };
  uint32_t abort;                     ///< set by the host of any rank; waiting kernels poll it
  uint8_t notice[kNoticeBytes];       ///< its notice, encoded (core/notice.h)
  uint32_t left;                      ///< 1: this rank is done with the memory of the others
  uint64_t kernel_errors[kMaxPeers];  ///< errors that our kernels report, by rank
};

/// The pointers, passed to kernels by value.
struct PeerPointers {
  uint8_t* data[kMaxPeers];  ///< the data of each rank; equal sizes
  Flags* flags[kMaxPeers];
  Progress* progress;
  ControlPage* control;
  int rank, ranks;
};

}  // namespace pycomm::device
