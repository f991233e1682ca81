// Trace: the recent operations of a group, for diagnosing a hang or a crash.
//
// It is a ring of records of two cache lines. Writers take no lock and allocate nothing; any thread
// may read at any time and gets every record whole. docs/trace.md describes what users see of it.
#pragma once
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/op.h"
#include "core/op_timing.h"

namespace pycomm {

enum class OpState : uint8_t { scheduled, started, completed, failed };
PYCOMM_API const char* name(OpState state);

/// One operation, as read from a trace.
struct OpRecord {
  uint64_t id = 0;  ///< in order of issue, from 1
  OpTag tag;        ///< seq 0 until it starts; for a send or recv see peer_tag()
  OpState state = OpState::scheduled;
  size_t sent = 0, received = 0;  ///< elements of this rank in an all_to_all
  const char* algo = "";
  // Times of a completed collective; see OpTiming.
  int64_t waited_ns = 0, coded_ns = 0;
  // Nanoseconds since the epoch; 0 for what has not happened.
  int64_t issued_ns = 0, started_ns = 0, ended_ns = 0;
};

/// Owner of a trace, in words that are equal on all ranks of the group where possible.
struct TraceOwner {
  std::string group;
  std::string description;
  int rank = 0;
  std::vector<int> global_ranks;  ///< of all members
};

class PYCOMM_API Trace {
 public:
  /// The operations that a trace keeps.
  static constexpr size_t kKept = 2048;

  explicit Trace(TraceOwner owner);
  /// Returns the traces of all existing groups of this process.
  static std::vector<std::shared_ptr<const Trace>> all();
  /// Makes a trace that all() finds.
  static std::shared_ptr<Trace> make(TraceOwner owner);

  const TraceOwner& owner() const { return owner_; }

  // Any thread may call these. Each returns or takes the number of the record; 0 is none.

  /// Records an operation that is issued now and runs later.
  uint64_t schedule(const OpTag& tag) { return append(tag, 0); }
  /// Records that it starts to run; `scheduled` is its record if there is one.
  uint64_t start(const OpTag& tag, uint64_t scheduled = 0) {
    if (scheduled == 0) return append(tag, ticks());
    restart(scheduled, tag);
    return scheduled;
  }
  void set_algo(uint64_t id, const char* algo) {
    if (Slot* slot = find(id)) slot->algo.store(algo, std::memory_order_relaxed);
  }
  /// Sets the elements of this rank, where the tag cannot say.
  void set_parts(uint64_t id, size_t sent, size_t received);
  /// Sets the sender of what was received from any rank.
  void set_root(uint64_t id, int root);
  void end(uint64_t id, bool fine = true) {
    if (Slot* slot = find(id)) {
      slot->ended.store(ticks() << 1 | (fine ? 0 : 1), std::memory_order_release);
    }
  }

  /// Records that a collective is completed, and how it spent its time.
  void end(uint64_t id, const OpTiming& timing) {
    Slot* slot = find(id);
    if (!slot) return;
    slot->waited.store(static_cast<float>(timing.waited), std::memory_order_relaxed);
    slot->coded.store(static_cast<float>(timing.coded), std::memory_order_relaxed);
    end(id);
  }
  /// Records the traffic to a rank over the network, from time to time.
  void note_link(int rank, const LinkUse& use) {
    links_[rank].bytes.store(use.bytes, std::memory_order_relaxed);
    links_[rank].busy_us.store(use.busy_us, std::memory_order_relaxed);
  }

  /// Sets the error that the group failed with; the first call counts.
  void set_error(const std::string& text);
  std::string error() const;

  /// Returns the records from the oldest to the newest.
  std::vector<OpRecord> read() const;
  /// Returns the traffic by rank.
  std::vector<LinkUse> links() const;
  /// Sets a function that is called before each read(), by its thread: for a caller that notices an
  /// end only by polling. Null removes it; none runs when this returns.
  void set_look(std::function<void()> look);

 private:
  static constexpr size_t kTagWords = sizeof(OpTag) / 8;

  struct alignas(128) Slot {
    std::atomic<uint64_t> id;  ///< 0 while it is being written
    std::atomic<uint64_t> tag[kTagWords];
    std::atomic<uint64_t> sent, received;
    std::atomic<const char*> algo;
    std::atomic<uint64_t> issued, started;  ///< ticks
    std::atomic<uint64_t> ended;            ///< ticks, with the lowest bit set on failure
    std::atomic<float> waited, coded;       ///< ticks
  };
  static_assert(sizeof(Slot) == 128, "a record is two cache lines");

  struct Link {
    std::atomic<uint64_t> bytes{0}, busy_us{0};
  };

  // Returns the slot of a record, or null. A slot may be taken over while its operation still runs,
  // if as many operations as there are slots follow it. The end then finds another number.
  Slot* find(uint64_t id) const {
    if (id == 0) return nullptr;
    Slot& slot = slots_[(id - 1) % kKept];
    return slot.id.load(std::memory_order_relaxed) == id ? &slot : nullptr;
  }
  static void put(Slot& slot, const OpTag& tag) {
    uint64_t words[kTagWords];
    std::memcpy(words, &tag, sizeof words);
    for (size_t i = 0; i < kTagWords; i++) slot.tag[i].store(words[i], std::memory_order_relaxed);
  }
  uint64_t append(const OpTag& tag, uint64_t started) {
    const uint64_t id = 1 + count_.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = slots_[(id - 1) % kKept];
    slot.id.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    put(slot, tag);
    slot.sent.store(0, std::memory_order_relaxed);
    slot.received.store(0, std::memory_order_relaxed);
    slot.algo.store("", std::memory_order_relaxed);
    slot.issued.store(started ? started : ticks(), std::memory_order_relaxed);
    slot.started.store(started, std::memory_order_relaxed);
    slot.ended.store(0, std::memory_order_relaxed);
    slot.waited.store(0, std::memory_order_relaxed);
    slot.coded.store(0, std::memory_order_relaxed);
    slot.id.store(id, std::memory_order_release);
    return id;
  }
  void restart(uint64_t id, const OpTag& tag);

  struct Release {
    void operator()(Slot* slots) const;
  };

  const TraceOwner owner_;
  const TickScale scale_;
  const std::unique_ptr<Slot[], Release> slots_;
  alignas(128) std::atomic<uint64_t> count_{0};
  std::unique_ptr<Link[]> links_;  ///< by rank
  mutable std::mutex error_mutex_;
  std::string error_;
  mutable std::mutex look_mutex_;
  std::function<void()> look_;
};

}  // namespace pycomm
