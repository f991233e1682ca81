// RankState: current operation of a rank, published to its peers. It is read when something fails:
// the texts of errors report the state of every rank.
#pragma once
#include <atomic>
#include <cstring>

#include "core/op.h"

namespace pycomm {

/// State of a rank. Plain bytes: it travels as it is.
struct RankState {
  OpTag call;              ///< the last collective that the rank has called; Op::none: none yet
  OpTag waits;             ///< the send or recv that it waits for, or Op::none
  uint64_t completed = 0;  ///< number of the last collective that it has completed
  Op completed_op = Op::none;
  uint8_t reserved[7] = {};

  bool inside() const { return call.seq > completed; }
};
static_assert(sizeof(RankState) == 144, "RankState travels without padding");

/// OpTag that one thread writes and others read occasionally, whole or not at all. Zero bytes are
/// valid, and it may lie in shared memory.
struct SharedTag {
  std::atomic<uint64_t> version;  ///< odd while the words are written
  std::atomic<uint64_t> words[sizeof(OpTag) / 8];

  void store(const OpTag& tag) {
    uint64_t values[sizeof(OpTag) / 8];
    std::memcpy(values, &tag, sizeof values);
    const uint64_t before = version.load(std::memory_order_relaxed);
    version.store(before + 1, std::memory_order_relaxed);
    for (size_t i = 0; i < sizeof(OpTag) / 8; i++) {
      words[i].store(values[i], std::memory_order_release);
    }
    version.store(before + 2, std::memory_order_release);
  }
  /// Returns false if it changed during the read.
  bool load(OpTag& tag) const {
    const uint64_t before = version.load(std::memory_order_acquire);
    uint64_t values[sizeof(OpTag) / 8];
    for (size_t i = 0; i < sizeof(OpTag) / 8; i++) {
      values[i] = words[i].load(std::memory_order_acquire);
    }
    std::memcpy(static_cast<void*>(&tag), values, sizeof values);
    return before % 2 == 0 && version.load(std::memory_order_relaxed) == before;
  }
};

/// RankState that its rank keeps up to date with a few stores per call. One thread at a time calls
/// begin() and end(), one at a time wait_for().
struct SharedRankState {
  SharedTag call;
  std::atomic<uint64_t> completed;  ///< number, and the op in the low byte
  SharedTag waits;

  void begin(const OpTag& tag) { call.store(tag); }
  void end(const OpTag& tag) {
    completed.store(tag.seq << 8 | static_cast<uint8_t>(tag.op), std::memory_order_relaxed);
  }
  /// Op::none: for nothing any more.
  void wait_for(const OpTag& tag) { waits.store(tag); }

  RankState load() const {
    RankState rank_state;
    // A writer takes nanoseconds, unless it was interrupted there: then half of the state is
    // enough.
    for (int i = 0; i < 1000 && !call.load(rank_state.call); i++) {
    }
    for (int i = 0; i < 1000 && !waits.load(rank_state.waits); i++) {
    }
    const uint64_t last = completed.load(std::memory_order_relaxed);
    rank_state.completed = last >> 8;
    rank_state.completed_op = static_cast<Op>(last & 0xff);
    return rank_state;
  }
};

}  // namespace pycomm
