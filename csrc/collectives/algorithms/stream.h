// Segmented transfer: a run of bytes travels from one rank to another in segments, so that the
// first are used while the last are in transit.
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/schedule.h"
#include "collectives/common/select.h"

namespace pycomm::stream {

/// Returns the elements of a segment.
inline size_t segment_numel(const CollectiveContext& context, size_t element) {
  return std::max<size_t>(1, plain_segment(context.segment_bytes(), context.speed()) / element);
}

/// Posts receives of all segments of `range` of `data`. Returns the ticket of each.
inline std::vector<uint64_t> recv(CollectiveContext& context, int peer, void* data,
                                  schedule::Range range, size_t element) {
  const size_t segment = segment_numel(context, element);
  auto* bytes = static_cast<uint8_t*>(data);
  std::vector<uint64_t> tickets;
  for (size_t s = 0; s < schedule::num_segments(range, segment); s++) {
    const schedule::Range part = schedule::segment(range, segment, s);
    tickets.push_back(context.recv(peer, bytes + part.begin * element, part.size() * element));
  }
  return tickets;
}

}  // namespace pycomm::stream
