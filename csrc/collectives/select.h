// Which algorithm a collective over channels uses, and in which pieces it travels. Every choice is
// a function of arguments that are equal on all ranks.
#pragma once
#include <cstddef>
#include <string>

namespace pycomm {

enum class Algo {
  one_shot,  ///< everybody sends everything to everybody: one latency, (n-1) times the bytes
  two_shot,  ///< reduce-scatter, then all-gather: two latencies, 2(n-1)/n times the bytes
  ring,      ///< the same bytes as two-shot over two neighbours only: 2(n-1) latencies
};

/// `wanted` is CommunicatorOptions::algo.
Algo select_all_reduce(size_t bytes, int ranks, const std::string& wanted);

/// True if a broadcast goes by scatter and all-gather instead of straight from the root.
bool select_scattered_broadcast(size_t bytes, int ranks);

/// Bytes of a segment of plain elements, and values of a segment of a coded bucket. `asked` is
/// CommunicatorOptions::segment_bytes.
size_t plain_segment(size_t asked);
size_t coded_segment(size_t asked);

/// Segments that may be on their way from one peer while earlier ones are folded.
constexpr size_t kReceivesAhead = 4;

}  // namespace pycomm
