// The recent operations of a group, for those who look after a hang or a crash.
//
// A ring of records of two cache lines. Writers take no lock and allocate nothing; any thread may
// read at any time and gets every record whole. docs/trace.md says what users see of it.
#pragma once
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/op.h"
#include "core/spent.h"

namespace pycomm {

enum class OpState : uint8_t { scheduled, started, completed, failed };
PYCOMM_API const char* name(OpState state);

/// One operation, as a trace is read.
struct OpRecord {
  uint64_t id = 0;  ///< in order of issue, from 1
  OpTag tag;        ///< seq 0 until it starts; for a send or recv see peer_tag()
  OpState state = OpState::scheduled;
  size_t sent = 0, received = 0;  ///< elements of this rank in an all_to_all
  const char* algo = "";
  // Of a collective that is completed; see Spent.
  int64_t waited_ns = 0, coded_ns = 0;
  int last = -1;
  // Nanoseconds since the epoch; 0 for what has not happened.
  int64_t issued_ns = 0, started_ns = 0, ended_ns = 0;
};

/// All completed collectives of one kind.
struct OpTotals {
  Op op = Op::none;
  uint64_t count = 0;
  uint64_t bytes = 0;  ///< as callers count elements
  int64_t ns = 0, waited_ns = 0, coded_ns = 0;
};

/// Whose trace it is, in words that are equal on all ranks of the group where they can be.
struct TraceOwner {
  std::string group;
  std::string description;
  int rank = 0;
  std::vector<int> global_ranks;  ///< of all members
};

class PYCOMM_API Trace {
 public:
  /// Remembers at least `size` operations; none if it is 0.
  Trace(TraceOwner owner, size_t size);
  /// The traces of all groups of this process that live.
  static std::vector<std::shared_ptr<const Trace>> all();
  /// The same as the constructor, and all() finds it.
  static std::shared_ptr<Trace> make(TraceOwner owner, size_t size);

  const TraceOwner& owner() const { return owner_; }

  // Any thread. Each returns or takes the number of the record; 0 is none.

  /// Notes an operation that is issued now and runs later.
  uint64_t schedule(const OpTag& tag) { return append(tag, 0); }
  /// It begins to run; `scheduled` names it if it was noted before.
  uint64_t start(const OpTag& tag, uint64_t scheduled = 0) {
    if (scheduled == 0) return append(tag, ticks());
    restart(scheduled, tag);
    return scheduled;
  }
  void set_algo(uint64_t id, const char* algo) {
    if (Slot* slot = find(id)) slot->algo.store(algo, std::memory_order_relaxed);
  }
  /// Elements of this rank, where the tag cannot say.
  void set_parts(uint64_t id, size_t sent, size_t received);
  /// Who sent what was received from any rank.
  void set_root(uint64_t id, int root);
  void end(uint64_t id, bool fine = true) {
    if (Slot* slot = find(id)) {
      slot->ended.store(ticks() << 1 | (fine ? 0 : 1), std::memory_order_release);
    }
  }

  /// A collective is completed. They end one at a time.
  void end(uint64_t id, const OpTag& tag, const Spent& spent) {
    Slot* slot = find(id);
    if (!slot) return;
    const uint64_t now = ticks();
    slot->spent.store(pack(spent), std::memory_order_relaxed);
    slot->ended.store(now << 1, std::memory_order_release);
    Totals& totals = totals_[static_cast<size_t>(tag.op)];
    add(totals.count, 1);
    add(totals.bytes, tag.numel * size_of(tag.dtype));
    add(totals.ticks, now - slot->started.load(std::memory_order_relaxed));
    add(totals.waited, spent.waited);
    add(totals.coded, spent.coded);
  }
  /// What has gone to a rank by the network, from time to time.
  void note_link(int rank, const LinkUse& use) {
    links_[rank].bytes.store(use.bytes, std::memory_order_relaxed);
    links_[rank].busy_us.store(use.busy_us, std::memory_order_relaxed);
  }

  /// What ended the group; the first call counts.
  void set_error(const std::string& text);
  std::string error() const;

  /// From the oldest to the newest.
  std::vector<OpRecord> read() const;
  /// Of the kinds that have been called.
  std::vector<OpTotals> totals() const;
  /// By rank.
  std::vector<LinkUse> links() const;
  /// Called before each read(), by its thread: for who learns of an end only by looking. Null: no
  /// more; none runs when this returns.
  void set_look(std::function<void()> look);

 private:
  static constexpr size_t kTagWords = sizeof(OpTag) / 8;

  struct alignas(128) Slot {
    std::atomic<uint64_t> id;  ///< 0 while it is written
    std::atomic<uint64_t> tag[kTagWords];
    std::atomic<uint64_t> sent, received;
    std::atomic<const char*> algo;
    std::atomic<uint64_t> issued, started;  ///< ticks
    std::atomic<uint64_t> ended;            ///< ticks, and in the lowest bit whether it failed
    std::atomic<uint64_t> spent;            ///< see pack()
  };
  static_assert(sizeof(Slot) == 128, "a record is two cache lines");

  struct alignas(64) Totals {
    std::atomic<uint64_t> count{0}, bytes{0}, ticks{0}, waited{0}, coded{0};
  };
  struct Link {
    std::atomic<uint64_t> bytes{0}, busy_us{0};
  };
  /// One thread at a time writes.
  static void add(std::atomic<uint64_t>& sum, uint64_t more) {
    sum.store(sum.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }

  // Two times of 24 bits each, of which 19 count and 5 say how far they are shifted, and the rank.
  static constexpr int kTimeBits = 24, kDigits = 19, kNobody = 0xffff;
  static uint64_t pack_time(uint64_t time) {
    const int shift = time >> kDigits ? 64 - kDigits - __builtin_clzll(time) : 0;
    return static_cast<uint64_t>(shift) << kDigits | time >> shift;
  }
  static uint64_t unpack_time(uint64_t packed) {
    return (packed & ((1 << kDigits) - 1)) << (packed >> kDigits & 31);
  }
  static uint64_t pack(const Spent& spent) {
    return static_cast<uint64_t>(spent.last & kNobody) << 2 * kTimeBits |
           pack_time(spent.waited) << kTimeBits | pack_time(spent.coded);
  }

  // A slot may be taken over while its operation still runs, if as many as there are slots come
  // after it. What ends then finds another number.
  Slot* find(uint64_t id) const {
    if (id == 0) return nullptr;
    Slot& slot = slots_[(id - 1) & mask_];
    return slot.id.load(std::memory_order_relaxed) == id ? &slot : nullptr;
  }
  static void put(Slot& slot, const OpTag& tag) {
    uint64_t words[kTagWords];
    std::memcpy(words, &tag, sizeof words);
    for (size_t i = 0; i < kTagWords; i++) slot.tag[i].store(words[i], std::memory_order_relaxed);
  }
  uint64_t append(const OpTag& tag, uint64_t started) {
    if (!slots_) return 0;
    const uint64_t id = 1 + count_.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = slots_[(id - 1) & mask_];
    slot.id.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    put(slot, tag);
    slot.sent.store(0, std::memory_order_relaxed);
    slot.received.store(0, std::memory_order_relaxed);
    slot.algo.store("", std::memory_order_relaxed);
    slot.issued.store(started ? started : ticks(), std::memory_order_relaxed);
    slot.started.store(started, std::memory_order_relaxed);
    slot.ended.store(0, std::memory_order_relaxed);
    slot.spent.store(uint64_t{kNobody} << 2 * kTimeBits, std::memory_order_relaxed);
    slot.id.store(id, std::memory_order_release);
    return id;
  }
  void restart(uint64_t id, const OpTag& tag);

  struct Release {
    size_t size;
    void operator()(Slot* slots) const;
  };

  const TraceOwner owner_;
  const TickScale scale_;
  size_t mask_ = 0;
  std::unique_ptr<Slot[], Release> slots_;
  alignas(128) std::atomic<uint64_t> count_{0};
  Totals totals_[kOps];
  std::unique_ptr<Link[]> links_;  ///< by rank
  mutable std::mutex error_mutex_;
  std::string error_;
  mutable std::mutex look_mutex_;
  std::function<void()> look_;
};

}  // namespace pycomm
