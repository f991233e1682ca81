#include "collectives/select.h"

#include <algorithm>

namespace pycomm {
namespace {

// One-shot sends n-1 times the bytes, two-shot 2(n-1)/n times but in two latencies: it loses while
// the bytes cost less than a latency. 16 KiB take 13 us at 10 Gbit/s, about one TCP round trip.
constexpr size_t kOneShotBytes = 16 << 10;
// With two ranks both send the same bytes up to twice this size for one latency less.
constexpr size_t kOneShotBytesTwoRanks = 32 << 10;
// Straight from the root costs its link n-1 times the bytes, scattered twice the bytes.
constexpr size_t kScatterBytes = 64 << 10;
// Large enough that a message's header and system calls vanish, small enough that the segments of
// all ranks stay in L2 while they are folded.
constexpr size_t kSegmentBytes = 256 << 10;

}  // namespace

Algo select_all_reduce(size_t bytes, int ranks, const std::string& wanted) {
  if (wanted == "ring") return Algo::ring;
  const size_t limit = ranks == 2 ? kOneShotBytesTwoRanks : kOneShotBytes;
  return bytes <= limit ? Algo::one_shot : Algo::two_shot;
}

bool select_scattered_broadcast(size_t bytes, int ranks) {
  return ranks > 2 && bytes >= kScatterBytes;
}

size_t plain_segment(size_t asked) { return asked ? asked : kSegmentBytes; }

size_t coded_segment(size_t asked) {
  return std::max<size_t>(1, plain_segment(asked) / sizeof(float));
}

}  // namespace pycomm
