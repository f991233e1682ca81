
#include "transports/shm/heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "transports/fd.h"
#include "transports/shm/region.h"

namespace pycomm {
namespace {

constexpr size_t kAlign = 64;
/// The pages of this many freed bytes are kept, or of as many as are in use if that is more: a page
/// that comes back costs more than a copy of it.
constexpr size_t kKeep = size_t{256} << 20;

/// Pages are given back after every copy of this size: that is how much memory is held twice.
constexpr size_t kCopy = size_t{16} << 20;

/// Has the kernel copy the pages of a private mapping that are still those of its file. A write of
/// another thread in the same moment is not lost. Where a failed exchange writes nothing (Arm) that
/// of a peer, in the file's page, must not let a page go uncopied.
void copy_pages(uint8_t* begin, const uint8_t* end, size_t page) {
  for (uint8_t* at = begin; at < end; at += page) {
    auto* word = reinterpret_cast<uint64_t*>(at);
    uint64_t same = __atomic_load_n(word, __ATOMIC_RELAXED);
    // Writes what is there.
    while (!__atomic_compare_exchange_n(word, &same, same, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
  }
}

/// Moves a mapping to where another one is, at one blow. A new one that is made there by MAP_FIXED
/// leaves a hole, on kernels before 6.12, where the system has no memory to promise for it.
bool put(void* mapping, size_t bytes, uint8_t* place) {
  if (mapping == MAP_FAILED) return false;
  keep_out_of_dumps(mapping, bytes);
  if (::mremap(mapping, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place) return true;
  const int error = errno;
  ::munmap(mapping, bytes);
  errno = error;
  return false;
}

}  // namespace

SharedHeap::SharedHeap(std::shared_ptr<void> owner, uint8_t* base, size_t bytes, HeapFile file)
    : owner_(std::move(owner)),
      base_(base),
      bytes_(bytes),
      file_(file),
      page_(page_size()),
      process_(::getpid()) {
  struct stat info = {};
  if (file_.fd >= 0 && ::fstat(file_.fd, &info) == 0) {
    file_name_[0] = info.st_dev;
    file_name_[1] = info.st_ino;
  }
  add_gap(0, {bytes, 0});
}

void* SharedHeap::allocate(size_t bytes) {
  if (::getpid() != process_) {
    throw Error(
        "a forked child cannot allocate shared memory of its parent's group; allocate it in the "
        "parent, or make a group of the children's own");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > bytes_) bytes = bytes_ + 1;  // does not fit, and does not overflow
  const size_t size = round_up(std::max<size_t>(bytes, 1), bytes < page_ ? kAlign : page_);
  // Small blocks lie anywhere; large ones begin at a page boundary, which costs up to one page.
  const size_t wanted = size + (size < page_ ? 0 : page_ - kAlign);
  const auto found = by_bytes_.lower_bound({wanted, 0});
  if (found == by_bytes_.end()) {
    throw Error("the shared heap of this rank is full: " + std::to_string(bytes) +
                " bytes wanted, " + std::to_string(used_) + " of " + std::to_string(bytes_) +
                " in use; free tensors that came from it, or allocate ordinary memory");
  }
  const auto gap = gaps_.find(found->second);
  const size_t begin = gap->first, offset = size < page_ ? begin : round_up(begin, page_);
  const Gap whole = take_gap(gap);
  const size_t before = offset - begin, after = whole.bytes - before - size;
  // Only the number of bytes that have pages is known; those in front are used first.
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
  const size_t begin = round_up(offset, page_), end = (offset + gap.bytes) / page_ * page_;
  if (begin >= end) return;
  if (taken_back_) {  // some of it may be private by now, so it gets new pages that no peer has
    constexpr int kNew = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    void* place = base_ + begin;
    if (::mmap(place, end - begin, PROT_READ | PROT_WRITE, kNew, -1, 0) != place) return;
  } else if (::madvise(base_ + begin, end - begin, MADV_REMOVE) != 0) {
    return;
  }
  gap.touched = gap.bytes - (end - begin);
}

std::string SharedHeap::take_back(Span<const uint8_t> memory) noexcept {
  if (::getpid() != process_ || memory.size == 0) return "";
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken_back_ = true;
    const auto begin = static_cast<size_t>(memory.data - base_);
    const Range pages{begin / page_ * page_, round_up(begin + memory.size, page_)};
    return make_private(pages) ? "" : error_text(errno);
  } catch (const std::exception& e) {
    return e.what();
  }
}

/// True while our descriptor is that of the file.
bool SharedHeap::is_open() const {
  struct stat info = {};
  return file_.fd >= 0 && ::fstat(file_.fd, &info) == 0 && info.st_dev == file_name_[0] &&
         info.st_ino == file_name_[1];
}

bool SharedHeap::make_private(Range range) {
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  constexpr int kFlags = MAP_PRIVATE | MAP_NORESERVE;
  uint8_t* const begin = base_ + range.begin;
  uint8_t* const end = base_ + range.end;
  if (is_open()) {
    // Maps the same pages, each until it is written to: no write of another thread is lost in
    // between.
    const auto from = static_cast<off_t>(file_.offset + range.begin);
    const auto bytes = static_cast<size_t>(end - begin);
    if (!put(::mmap(nullptr, bytes, kAccess, kFlags, file_.fd, from), bytes, begin)) return false;
    for (size_t done = 0; done < bytes; done += kCopy) {
      const size_t size = std::min(kCopy, bytes - done);
      copy_pages(begin + done, begin + done + size, page_);
      ::fallocate(file_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  from + static_cast<off_t>(done), static_cast<off_t>(size));
    }
    return true;
  }
  // Our descriptor has been closed by other code. Bytes that other threads write to a piece while
  // it is copied are lost, so pieces are small.
  constexpr size_t kPiece = size_t{256} << 10;
  for (uint8_t* at = begin; at < end; at += kPiece) {
    const size_t size = std::min(kPiece, static_cast<size_t>(end - at));
    void* copy = ::mmap(nullptr, size, kAccess, kFlags | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return false;
    std::memcpy(copy, at, size);
    if (!put(copy, size, at)) return false;
  }
  return true;
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
