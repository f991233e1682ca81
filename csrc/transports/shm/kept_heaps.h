// Heaps that outlive their group: the mapping that holds the heaps of all ranks of a host, for the
// next group of the same processes. Tensors that lie in them, such as a reducer's buckets, are then
// addressed in place by the new group as well.
//
// Of a region only the heaps are kept. What a group's ranks write to tell each other anything
// (slots, staging, rings) is new memory in each group, so a rank that was stopped in a former group
// and continues there writes what nobody reads any more. In a heap such a rank could still write
// where the operation that it was stopped in was to have its result. The owner of that memory takes
// it back before it gets the error (SharedHeap::take_back), and heaps of which anything was taken
// back are not kept.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transports/shm/heap.h"

namespace pycomm {

/// The heaps of the ranks of a region, as one of these ranks has mapped them.
struct KeptHeaps {
  std::shared_ptr<void> memory;      ///< keeps the heaps mapped
  uint8_t* base = nullptr;           ///< of the first heap
  uint64_t name = 0;                 ///< random: the same on all ranks, other than that of others
  uint32_t own = 0;                  ///< number of our heap
  std::shared_ptr<SharedHeap> heap;  ///< ours

  /// Returns what a rank publishes of its heaps, which may be null: "name number", or "none".
  static std::string value(const KeptHeaps* heaps);
  /// Returns the numbers of the heaps of ranks that have published these values; nothing unless all
  /// have mapped the same heaps.
  static std::vector<uint32_t> numbers(const std::vector<std::string>& values);
};

}  // namespace pycomm
