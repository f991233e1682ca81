// Shared heap: memory of one rank that all ranks of its shared region have mapped (shm/region.h).
// Peers read and write allocations in place, so collectives on them copy nothing.
//
// The heap is sparse: pages cost memory from their first touch. Freed memory is kept for the next
// allocation; beyond kKeep its pages go back to the system. All bookkeeping is private to the rank.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "core/types.h"

namespace pycomm {

/// The file of a heap that other processes have mapped too.
struct HeapFile {
  int fd = -1;        ///< -1: none; the heap's owner keeps it open
  size_t offset = 0;  ///< of the heap
};

class PYCOMM_API SharedHeap {
 public:
  /// `base` has `bytes` bytes, which `owner` keeps mapped.
  SharedHeap(std::shared_ptr<void> owner, uint8_t* base, size_t bytes, HeapFile file);
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  // These may be called by any thread. In a forked child there is no heap: allocate() throws,
  // free() does nothing.

  /// Returns memory that is at least 64-byte aligned, whole pages from one page on; its contents
  /// are unspecified. Throws Error if there is no room.
  void* allocate(size_t bytes);
  /// Takes a pointer that allocate() returned, or null.
  void free(void* data) noexcept;
  /// Takes memory of ours away from the peers: it keeps its address and its contents, also what
  /// other threads write meanwhile, and later writes of peers no longer reach it. For groups that
  /// have failed. Returns why it could not be done, or an empty string.
  std::string take_back(Span<const uint8_t> memory) noexcept;

  /// Return the bytes handed out, and the freed bytes whose pages are kept.
  size_t used() const;
  size_t kept() const;

 private:
  /// Memory between two blocks, freed or never used.
  struct Gap {
    size_t bytes = 0;
    size_t touched = 0;  ///< at most this many of its bytes have pages
  };
  using Gaps = std::map<size_t, Gap>;

  /// The whole pages of a range.
  struct Range {
    size_t begin, end;
  };
  bool make_private(Range range);
  bool is_open() const;
  void add_gap(size_t offset, Gap gap);
  Gap take_gap(Gaps::iterator gap);
  /// Gives the whole pages of a gap back.
  void release(size_t offset, Gap& gap);

  const std::shared_ptr<void> owner_;
  uint8_t* const base_;
  const size_t bytes_;
  const HeapFile file_;
  uint64_t file_name_[2] = {};  ///< device and inode: other code may close our descriptor
  const size_t page_;
  const pid_t process_;
  mutable std::mutex mutex_;
  Gaps gaps_;                                     ///< by offset
  std::set<std::pair<size_t, size_t>> by_bytes_;  ///< the same gaps: bytes, offset
  std::unordered_map<size_t, size_t> blocks_;     ///< offset to bytes
  size_t used_ = 0;
  size_t kept_ = 0;
  bool taken_back_ = false;  ///< true for some of it
};

/// Allocates a block that frees itself; it keeps the heap alive.
PYCOMM_API std::shared_ptr<void> allocate_shared(const std::shared_ptr<SharedHeap>& heap,
                                                 size_t bytes);

}  // namespace pycomm
