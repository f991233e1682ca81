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

/// Posts all segments of `range` of `data`.
inline void send(CollectiveContext& context, int peer, const void* data, schedule::Range range,
                 size_t element) {
  const size_t segment = segment_numel(context, element);
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t s = 0; s < schedule::num_segments(range, segment); s++) {
    const schedule::Range part = schedule::segment(range, segment, s);
    context.send(peer, bytes + part.begin * element, part.size() * element);
  }
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

/// Returns the bytes of memory that visit() needs for ranges of up to `numel` elements.
inline size_t slots_bytes(const CollectiveContext& context, size_t numel, size_t element) {
  return kReceivesAhead * std::min(segment_numel(context, element), numel) * element;
}

/// Receives what a peer sends of `range` into `slots`, a few segments ahead, and calls
/// use(segment, bytes) for each in order.
template <typename Use>
void visit(CollectiveContext& context, int peer, schedule::Range range, size_t element,
           uint8_t* slots, const Use& use) {
  const size_t segment = segment_numel(context, element),
               count = schedule::num_segments(range, segment),
               slot_bytes = std::min(segment, range.size()) * element;
  uint64_t tickets[kReceivesAhead];
  const auto slot = [&](size_t s) { return slots + s % kReceivesAhead * slot_bytes; };
  const auto receive = [&](size_t s) {
    const size_t bytes = schedule::segment(range, segment, s).size() * element;
    tickets[s % kReceivesAhead] = context.recv(peer, slot(s), bytes);
  };
  for (size_t s = 0; s < std::min(kReceivesAhead, count); s++) receive(s);
  for (size_t s = 0; s < count; s++) {
    context.wait(peer, tickets[s % kReceivesAhead]);
    use(schedule::segment(range, segment, s), slot(s));
    if (s + kReceivesAhead < count) receive(s + kReceivesAhead);
  }
}

}  // namespace pycomm::stream
