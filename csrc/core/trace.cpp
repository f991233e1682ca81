// Trace, the slow part: memory, reading, and the registry of all traces.
#include "core/trace.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <new>

namespace pycomm {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Trace>> traces;
};

// Registry of all traces, since code that inspects a hanging process holds none of its groups.
Registry& registry() {
  static Registry registry;
  return registry;
}

// The pages are zero: no record has the number 0, and memory that is never written costs nothing.
void* zero_pages(size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

}  // namespace

const char* name(OpState state) {
  constexpr const char* kNames[] = {"scheduled", "started", "completed", "failed"};
  return kNames[static_cast<uint8_t>(state)];
}

void Trace::Release::operator()(Slot* slots) const { ::munmap(slots, kKept * sizeof(Slot)); }

Trace::Trace(TraceOwner owner)
    : owner_(std::move(owner)),
      slots_(static_cast<Slot*>(zero_pages(kKept * sizeof(Slot)))),
      links_(new Link[owner_.global_ranks.size()]) {}

std::shared_ptr<Trace> Trace::make(TraceOwner owner) {
  auto trace = std::make_shared<Trace>(std::move(owner));
  const std::lock_guard<std::mutex> lock(registry().mutex);
  auto& traces = registry().traces;
  traces.erase(std::remove_if(traces.begin(), traces.end(),
                              [](const auto& other) { return other.expired(); }),
               traces.end());
  traces.push_back(trace);
  return trace;
}

std::vector<std::shared_ptr<const Trace>> Trace::all() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  std::vector<std::shared_ptr<const Trace>> living;
  for (const auto& weak : registry().traces) {
    if (auto trace = weak.lock()) living.push_back(std::move(trace));
  }
  return living;
}

void Trace::set_parts(uint64_t id, size_t sent, size_t received) {
  Slot* slot = find(id);
  if (!slot) return;
  slot->sent.store(sent, std::memory_order_relaxed);
  slot->received.store(received, std::memory_order_relaxed);
}

void Trace::set_root(uint64_t id, int root) {
  Slot* slot = find(id);
  if (!slot) return;
  constexpr size_t kWord = offsetof(OpTag, root) / 8;
  static_assert(offsetof(OpTag, root) % 8 == 0 && sizeof root == 4);
  const uint64_t rest = slot->tag[kWord].load(std::memory_order_relaxed) >> 32 << 32;
  slot->tag[kWord].store(rest | static_cast<uint32_t>(root), std::memory_order_relaxed);
}

void Trace::restart(uint64_t id, const OpTag& tag) {
  Slot* slot = find(id);
  if (!slot) return;
  slot->id.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  put(*slot, tag);
  slot->started.store(ticks(), std::memory_order_relaxed);
  slot->id.store(id, std::memory_order_release);
}

void Trace::set_error(const std::string& text) {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  if (error_.empty()) error_ = text;
}

std::string Trace::error() const {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  return error_;
}

std::vector<LinkUse> Trace::links() const {
  std::vector<LinkUse> links;
  for (size_t rank = 0; rank < owner_.global_ranks.size(); rank++) {
    links.push_back({links_[rank].bytes.load(std::memory_order_relaxed),
                     links_[rank].busy_us.load(std::memory_order_relaxed)});
  }
  return links;
}

void Trace::set_look(std::function<void()> look) {
  const std::lock_guard<std::mutex> lock(look_mutex_);
  look_ = std::move(look);
}

std::vector<OpRecord> Trace::read() const {
  {
    const std::lock_guard<std::mutex> lock(look_mutex_);
    if (look_) look_();
  }
  std::vector<OpRecord> records;
  const uint64_t last = count_.load(std::memory_order_acquire);
  const uint64_t kept = std::min<uint64_t>(last, kKept);
  const TickScale::Reading scale = scale_.read();
  const auto time = [&scale](uint64_t stamp) { return stamp ? scale.epoch_ns(stamp) : 0; };
  const auto time_in = [&scale](const std::atomic<float>& stage) {
    return scale.ns(static_cast<uint64_t>(stage.load(std::memory_order_relaxed)));
  };
  records.reserve(kept);
  for (uint64_t id = last - kept + 1; id <= last; id++) {
    const Slot& slot = slots_[(id - 1) % kKept];
    // A record that is being written is left out: it is newer than the first look, or too old.
    if (slot.id.load(std::memory_order_acquire) != id) continue;
    OpRecord record;
    record.id = id;
    uint64_t words[kTagWords];
    for (size_t i = 0; i < kTagWords; i++) words[i] = slot.tag[i].load(std::memory_order_relaxed);
    std::memcpy(static_cast<void*>(&record.tag), words, sizeof words);
    record.sent = slot.sent.load(std::memory_order_relaxed);
    record.received = slot.received.load(std::memory_order_relaxed);
    record.algo = slot.algo.load(std::memory_order_relaxed);
    const uint64_t ended = slot.ended.load(std::memory_order_relaxed);
    const uint64_t started = slot.started.load(std::memory_order_relaxed);
    record.issued_ns = time(slot.issued.load(std::memory_order_relaxed));
    record.started_ns = time(started);
    // The stamp lost its highest bit to make room; counts of the processor never reach it.
    record.ended_ns = time(ended >> 1);
    record.waited_ns = time_in(slot.waited);
    record.coded_ns = time_in(slot.coded);
    record.state = ended     ? (ended & 1 ? OpState::failed : OpState::completed)
                   : started ? OpState::started
                             : OpState::scheduled;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (slot.id.load(std::memory_order_relaxed) == id) records.push_back(record);
  }
  return records;
}

}  // namespace pycomm
