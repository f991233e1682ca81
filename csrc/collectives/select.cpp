#include "collectives/select.h"

#include <algorithm>

namespace pycomm {
namespace {

// One-shot takes L + (n-1) b/B, two-shot 2 L + 2 (n-1)/n b/B: with latency L and bandwidth B they
// meet at b = L B n / ((n-1)(n-2)). L B is 20 KB at 10 Gbit/s and 16 us, a TCP message on loopback.
constexpr size_t kLatencyBytes = 20000;
// Two ranks send the same bytes either way. One-shot reduces them all at both ends, at 5 GB/s or
// more, and only after the last has come: half of 128 KiB more is 13 us, again one latency.
constexpr size_t kOneShotBytesTwoRanks = 128 << 10;
// Straight from the root costs its link n-1 times the bytes, scattered twice the bytes.
constexpr size_t kScatterBytes = 64 << 10;
// Large enough that a message's header and system calls vanish, small enough that the segments of
// all ranks stay in L2 while they are folded.
constexpr size_t kSegmentBytes = 256 << 10;

}  // namespace

Algo select_all_reduce(size_t bytes, int ranks, const std::string& wanted) {
  if (ranks == 1) return Algo::one_shot;
  if (wanted == "ring") return Algo::ring;
  const size_t n = static_cast<size_t>(ranks);
  const size_t limit = n == 2 ? kOneShotBytesTwoRanks : kLatencyBytes * n / ((n - 1) * (n - 2));
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
