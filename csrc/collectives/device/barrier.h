// Barrier between kernels of different ranks.
//
// Block b of a rank synchronizes with block b of the others, and counts its barriers, from launch
// to launch: the count is in its rank's memory, so nothing is ever reset and a captured graph can
// be replayed. In a barrier, a block writes the count into the flags of each peer (release, for the
// whole system) and waits until its own flags have reached it (acquire). Between barriers m-1 and m
// it is in round m.
//
// The memory that a rank shares has two halves, and block b has a slot in each. In round m a block
// writes slot m % 2, in round m+1 its peers read it. It writes that slot again in round m+2, after
// barrier m+1, which every peer entered only after it had read. So one barrier per round is enough,
// whatever operations follow each other.
#pragma once
#include "collectives/device/calls.h"
#include "collectives/device/executor.h"

namespace pycomm::device {

/// State of one block in one operation.
template <typename Machine>
class DeviceBarrier {
 public:
  PYCOMM_KERNEL DeviceBarrier(const Machine& m, const DeviceCall& call)
      : m_(m), call_(call), first_(call.peers.progress->barriers[m.block()]), count_(first_) {}

  /// Returns false if an operation before has failed. For all threads alike, as arrive_wait().
  PYCOMM_KERNEL bool start() const {
    return m_.all(m_.load_relaxed(&call_.peers.progress->broken) == 0);
  }
  PYCOMM_KERNEL void end() const {
    if (m_.thread() == 0) call_.peers.progress->barriers[m_.block()] = count_;
  }

  /// Slot of rank `r` that is written in this round, and the one that was written in the last.
  PYCOMM_KERNEL uint8_t* writes(int r) const { return slot(r, count_ + 1); }
  PYCOMM_KERNEL const uint8_t* reads(int r) const { return slot(r, count_); }

  /// Ends the round: what it has written can be read. Returns false if a rank did not arrive.
  PYCOMM_KERNEL bool arrive_wait() {
    const int self = call_.peers.rank;
    count_++;
    m_.all(true);
    const uint64_t word = static_cast<uint64_t>(call_.hash) << 32 | count_;
    bool arrived = true;
    for (int r = m_.thread(); r < call_.peers.ranks; r += m_.threads()) {
      if (r != self) m_.release(&call_.peers.flags[r]->arrived[m_.block()][self], word);
    }
    for (int r = m_.thread(); r < call_.peers.ranks; r += m_.threads()) {
      if (r != self) arrived = wait_for(r) && arrived;
    }
    return m_.all(arrived);
  }

 private:
  PYCOMM_KERNEL uint8_t* slot(int r, uint32_t round) const {
    const size_t place = (round & 1) * static_cast<size_t>(call_.slots) + m_.block();
    return call_.peers.data[r] + place * call_.slot_bytes;
  }

  PYCOMM_KERNEL bool wait_for(int r) const {
    const uint64_t* flag = &call_.peers.flags[call_.peers.rank]->arrived[m_.block()][r];
    uint64_t since = 0;
    for (uint32_t polls = 1;; polls++) {
      const uint64_t word = m_.acquire(flag);
      const auto ahead = static_cast<int32_t>(static_cast<uint32_t>(word) - count_);
      if (ahead > 0) return true;  // it was here, and found that we do the same
      if (ahead == 0) {
        return static_cast<uint32_t>(word >> 32) == call_.hash ||
               report_error(KernelError::kMismatch, r);
      }
      if (polls % Machine::kPollsPerCheck == 0) {
        if (m_.load_relaxed(&call_.peers.progress->broken) != 0) return false;
        if (m_.load_relaxed(&call_.peers.control->abort) != ControlPage::kNone) return give_up();
        const uint64_t now = m_.now();
        if (since == 0) since = now;
        if (now - since > call_.timeout_ns) return report_error(KernelError::kLate, r);
      }
      m_.pause();
    }
  }

  PYCOMM_KERNEL bool report_error(KernelError::Kind kind, int r) const {
    const KernelError kernel_error{kind, count_ - first_, call_.seq};
    m_.release(&call_.peers.control->kernel_errors[r], kernel_error.word());
    return give_up();
  }
  PYCOMM_KERNEL bool give_up() const {
    m_.store_relaxed(&call_.peers.progress->broken, 1);
    return false;
  }

  const Machine& m_;
  const DeviceCall& call_;
  const uint32_t first_;
  uint32_t count_;
};

// -------------------------------------------------------------------------------- bytes

/// Bytes of one access.
struct alignas(16) Bytes16 {
  uint64_t half[2];
};

PYCOMM_KERNEL bool aligned(const void* a) { return reinterpret_cast<size_t>(a) % 16 == 0; }

/// Copies bytes, with all threads of the block.
template <typename Machine>
PYCOMM_KERNEL void copy(const Machine& m, uint8_t* to, const uint8_t* from, size_t bytes) {
  size_t done = 0;
  if (aligned(to) && aligned(from)) {
    constexpr int kDepth = 4;  // accesses on their way at once
    const size_t n = bytes / sizeof(Bytes16), step = m.threads();
    auto* wide = reinterpret_cast<Bytes16*>(to);
    const auto* source = reinterpret_cast<const Bytes16*>(from);
    size_t i = m.thread();
    for (; i + (kDepth - 1) * step < n; i += kDepth * step) {
      Bytes16 held[kDepth];
      PYCOMM_UNROLL
      for (int k = 0; k < kDepth; k++) held[k] = source[i + k * step];
      PYCOMM_UNROLL
      for (int k = 0; k < kDepth; k++) wide[i + k * step] = held[k];
    }
    for (; i < n; i += step) wide[i] = source[i];
    done = n * sizeof(Bytes16);
  }
  for (size_t i = done + m.thread(); i < bytes; i += m.threads()) to[i] = from[i];
}

/// Overwrites the result of a failed operation, so that nobody takes for one what was there before:
/// these bytes are NaN in every floating type, and no payload of a codec.
template <typename Machine>
PYCOMM_KERNEL void spoil(const Machine& m, uint8_t* result, size_t bytes) {
  PYCOMM_NO_UNROLL
  for (size_t i = m.thread(); i < bytes; i += m.threads()) result[i] = 0xFF;
}

/// Begin and end of share `index` of `count` in a run, cut at multiples of 16 bytes.
struct Share {
  size_t begin, end;
  PYCOMM_KERNEL size_t size() const { return end - begin; }
};

PYCOMM_KERNEL Share share(size_t bytes, int count, int index) {
  const size_t units = (bytes + 15) / 16, base = units / count, extra = units % count, i = index;
  const size_t first = i * base + (i < extra ? i : extra);
  const size_t last = first + base + (i < extra);
  return {first * 16 < bytes ? first * 16 : bytes, last * 16 < bytes ? last * 16 : bytes};
}

/// Returns what is left of a share from `done` on, at most `most`.
PYCOMM_KERNEL Share part_of(const Share& share, size_t done, size_t most) {
  const size_t begin = share.begin + done < share.end ? share.begin + done : share.end;
  const size_t end = begin + most < share.end ? begin + most : share.end;
  return {begin, end};
}

}  // namespace pycomm::device
