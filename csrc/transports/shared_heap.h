// Memory of one rank that all ranks of its segment have mapped (segment.h): what is allocated here
// is read and written by peers where it lies, so collectives on it copy nothing.
//
// The heap is sparse: pages cost from their first touch. What is freed is kept for the next
// allocation; beyond kKeep its pages go back to the system. All bookkeeping is private to the rank.
#pragma once
#include <sys/types.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "core/types.h"

namespace pycomm {

class PYCOMM_API SharedHeap {
 public:
  /// `base` has `bytes` bytes, which `owner` keeps mapped.
  SharedHeap(std::shared_ptr<void> owner, uint8_t* base, size_t bytes);
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  // Any thread. In a forked child there is no heap: allocate() throws, free() does nothing.

  /// At least 64-byte aligned, whole pages from one page on; what it holds is unspecified. Throws
  /// Error if there is no room.
  void* allocate(size_t bytes);
  /// What allocate() returned, or null.
  void free(void* data) noexcept;

  bool contains(const void* data) const {
    return static_cast<size_t>(static_cast<const uint8_t*>(data) - base_) < bytes_;
  }
  /// Bytes handed out, and bytes freed whose pages are kept.
  size_t used() const;
  size_t kept() const;

 private:
  /// Freed or never used, between two blocks.
  struct Gap {
    size_t bytes = 0;
    size_t touched = 0;  ///< at most so many of its bytes have pages
  };
  using Gaps = std::map<size_t, Gap>;

  void add_gap(size_t offset, Gap gap);
  Gap take_gap(Gaps::iterator gap);
  /// Gives the whole pages of a gap back.
  void release(size_t offset, Gap& gap);

  const std::shared_ptr<void> owner_;
  uint8_t* const base_;
  const size_t bytes_;
  const pid_t process_;
  mutable std::mutex mutex_;
  Gaps gaps_;                                     ///< by offset
  std::set<std::pair<size_t, size_t>> by_bytes_;  ///< the same gaps: bytes, offset
  std::unordered_map<size_t, size_t> blocks_;     ///< offset to bytes
  size_t used_ = 0;
  size_t kept_ = 0;
};

/// A block that frees itself; it keeps the heap.
PYCOMM_API std::shared_ptr<void> allocate_shared(const std::shared_ptr<SharedHeap>& heap,
                                                 size_t bytes);

}  // namespace pycomm
