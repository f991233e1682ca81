// A run of bytes that travels from one rank to another in segments, so that the first are used
// while the last are under way.
#pragma once
#include "collectives/exchange.h"
#include "collectives/schedule.h"
#include "collectives/select.h"

namespace pycomm::stream {

/// Elements of a segment.
inline size_t segment_numel(const Exchange& ex, size_t element) {
  return std::max<size_t>(1, plain_segment(ex.segment_bytes()) / element);
}

/// Posts all segments of `range` of `data`.
inline void send(Exchange& ex, int peer, const void* data, schedule::Range range, size_t element) {
  const size_t segment = segment_numel(ex, element);
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t s = 0; s < schedule::num_segments(range, segment); s++) {
    const schedule::Range part = schedule::segment(range, segment, s);
    ex.send(peer, bytes + part.begin * element, part.size() * element);
  }
}

/// Posts receives of all segments of `range` of `data`. Returns the ticket of each.
inline std::vector<uint64_t> recv(Exchange& ex, int peer, void* data, schedule::Range range,
                                  size_t element) {
  const size_t segment = segment_numel(ex, element);
  auto* bytes = static_cast<uint8_t*>(data);
  std::vector<uint64_t> tickets;
  for (size_t s = 0; s < schedule::num_segments(range, segment); s++) {
    const schedule::Range part = schedule::segment(range, segment, s);
    tickets.push_back(ex.recv(peer, bytes + part.begin * element, part.size() * element));
  }
  return tickets;
}

/// Bytes of memory that visit() needs for ranges of up to `numel` elements.
inline size_t slots_bytes(const Exchange& ex, size_t numel, size_t element) {
  return kReceivesAhead * std::min(segment_numel(ex, element), numel) * element;
}

/// Receives what a peer sends of `range` into `slots`, a few segments ahead, and calls
/// use(segment, bytes) for each in order.
template <typename Use>
void visit(Exchange& ex, int peer, schedule::Range range, size_t element, uint8_t* slots,
           const Use& use) {
  const size_t segment = segment_numel(ex, element), count = schedule::num_segments(range, segment),
               slot_bytes = std::min(segment, range.size()) * element;
  uint64_t tickets[kReceivesAhead];
  const auto slot = [&](size_t s) { return slots + s % kReceivesAhead * slot_bytes; };
  const auto receive = [&](size_t s) {
    const size_t bytes = schedule::segment(range, segment, s).size() * element;
    tickets[s % kReceivesAhead] = ex.recv(peer, slot(s), bytes);
  };
  for (size_t s = 0; s < std::min(kReceivesAhead, count); s++) receive(s);
  for (size_t s = 0; s < count; s++) {
    ex.wait(peer, tickets[s % kReceivesAhead]);
    use(schedule::segment(range, segment, s), slot(s));
    if (s + kReceivesAhead < count) receive(s + kReceivesAhead);
  }
}

}  // namespace pycomm::stream
