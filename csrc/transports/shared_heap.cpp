#include "transports/shared_heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "core/error.h"

namespace pycomm {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kPage = 4096;
/// Freed bytes whose pages are kept, or as much as is in use if that is more: a page that comes
/// back costs more than a copy of it.
constexpr size_t kKeep = size_t{256} << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

SharedHeap::SharedHeap(std::shared_ptr<void> owner, uint8_t* base, size_t bytes)
    : owner_(std::move(owner)), base_(base), bytes_(bytes), process_(::getpid()) {
  add_gap(0, {bytes, 0});
}

void* SharedHeap::allocate(size_t bytes) {
  if (::getpid() != process_) {
    throw Error("a forked child cannot allocate shared memory of its parent's group");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > bytes_) bytes = bytes_ + 1;  // does not fit, nor overflow
  const size_t size = round_up(std::max<size_t>(bytes, 1), bytes < kPage ? kAlign : kPage);
  // Small blocks lie anywhere; large ones begin at a page, which costs up to a page before them.
  const size_t wanted = size + (size < kPage ? 0 : kPage - kAlign);
  const auto found = by_bytes_.lower_bound({wanted, 0});
  if (found == by_bytes_.end()) {
    throw Error("the shared heap of this rank is full: " + std::to_string(bytes) +
                " bytes wanted, " + std::to_string(used_) + " of " + std::to_string(bytes_) +
                " in use; free tensors that came from it, or allocate ordinary memory");
  }
  const auto gap = gaps_.find(found->second);
  const size_t begin = gap->first, offset = size < kPage ? begin : round_up(begin, kPage);
  const Gap whole = take_gap(gap);
  const size_t before = offset - begin, after = whole.bytes - before - size;
  // Which bytes have pages is known by their number only; those in front are used first.
  const size_t touched_before = std::min(whole.touched, before);
  const size_t touched_after = whole.touched - std::min(whole.touched, before + size);
  if (before > 0) add_gap(begin, {before, touched_before});
  if (after > 0) add_gap(offset + size, {after, touched_after});
  blocks_.emplace(offset, size);
  used_ += size;
  return base_ + offset;
}

void SharedHeap::free(void* data) noexcept {
  if (!data || ::getpid() != process_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t offset = static_cast<size_t>(static_cast<uint8_t*>(data) - base_);
  const auto block = blocks_.find(offset);
  if (block == blocks_.end()) return;
  Gap gap{block->second, block->second};
  used_ -= block->second;
  blocks_.erase(block);
  auto next = gaps_.lower_bound(offset);
  if (next != gaps_.end() && next->first == offset + gap.bytes) {
    const auto neighbour = next++;
    const Gap theirs = take_gap(neighbour);
    gap = {gap.bytes + theirs.bytes, gap.touched + theirs.touched};
  }
  if (next != gaps_.begin()) {
    const auto neighbour = std::prev(next);
    if (neighbour->first + neighbour->second.bytes == offset) {
      offset = neighbour->first;
      const Gap theirs = take_gap(neighbour);
      gap = {gap.bytes + theirs.bytes, gap.touched + theirs.touched};
    }
  }
  if (kept_ + gap.touched > std::max(kKeep, used_)) release(offset, gap);
  add_gap(offset, gap);
}

void SharedHeap::release(size_t offset, Gap& gap) {
  const size_t begin = round_up(offset, kPage), end = (offset + gap.bytes) / kPage * kPage;
  if (begin >= end || ::madvise(base_ + begin, end - begin, MADV_REMOVE) != 0) return;
  gap.touched = gap.bytes - (end - begin);
}

void SharedHeap::add_gap(size_t offset, Gap gap) {
  gaps_.emplace(offset, gap);
  by_bytes_.emplace(gap.bytes, offset);
  kept_ += gap.touched;
}

SharedHeap::Gap SharedHeap::take_gap(Gaps::iterator gap) {
  const Gap result = gap->second;
  by_bytes_.erase({result.bytes, gap->first});
  kept_ -= result.touched;
  gaps_.erase(gap);
  return result;
}

size_t SharedHeap::used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

size_t SharedHeap::kept() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return kept_;
}

std::shared_ptr<void> allocate_shared(const std::shared_ptr<SharedHeap>& heap, size_t bytes) {
  return {heap->allocate(bytes), [heap](void* data) { heap->free(data); }};
}

}  // namespace pycomm
