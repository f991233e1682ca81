#include "collectives/common/cost.h"

#include <algorithm>
#include <cstdio>

#include "core/env.h"
#include "core/error.h"

namespace pycomm {
namespace {

// Default segment: large enough that a message's header and system calls are negligible, small
// enough that the segments of all ranks stay in L2 while they are folded.
constexpr size_t kSegmentBytes = 256 << 10;
// On a slow link a segment is what it carries in this time, in whole cache lines, but not so little
// that messages cost more than bytes.
constexpr double kSegmentSeconds = 4e-3;
constexpr size_t kLeastSegmentBytes = 16 << 10, kLine = 64;

/// Prices in seconds. docs/algorithms.md says how they were measured.
struct Price {
  double round;    ///< from a send to its arrival, when there is nothing else to do
  double message;  ///< processor time to send and to receive one
  double byte;     ///< to send and to receive
  double fold;     ///< per byte that is read to reduce
};
constexpr Price kSharedMemory{1e-6, 0.5e-6, 0.25e-9, 0.1e-9};
constexpr Price kTcp{15e-6, 8e-6, 0.8e-9, 0.1e-9};

}  // namespace

Algo parse_algo(const std::string& word) {
  std::string known;
  for (size_t i = 0; i < std::size(kAlgoNames); i++) {
    if (word == kAlgoNames[i]) return static_cast<Algo>(i);
    known += (i == 0 ? "" : ", ") + std::string(kAlgoNames[i]);
  }
  throw Error("unknown algo \"" + word + "\"; use one of " + known);
}

double seconds(const Cost& cost, Medium medium, const Speed& speed) {
  Price price = medium == Medium::tcp ? kTcp : kSharedMemory;
  price.round = std::max(price.round, speed.way);
  price.byte = std::max(price.byte, speed.byte);
  return cost.rounds * price.round + cost.messages * price.message + cost.sent * price.byte +
         cost.folded * price.fold;
}

std::string time_text(double seconds) {
  char text[32];
  const bool long_one = seconds >= 1e-3;
  std::snprintf(text, sizeof text, "%.3g %s", seconds * (long_one ? 1e3 : 1e6),
                long_one ? "ms" : "us");
  return text;
}

bool goes_by_levels(const Topology& topology, Algo wanted) {
  return (wanted == Algo::automatic || wanted == Algo::hierarchical) && topology.has_levels();
}

size_t plain_segment(size_t asked, const Speed& speed) {
  if (asked) return asked;
  if (speed.byte == 0) return kSegmentBytes;
  const double bytes = kSegmentSeconds / speed.byte;
  if (bytes >= kSegmentBytes) return kSegmentBytes;
  return std::max(kLeastSegmentBytes, static_cast<size_t>(bytes) / kLine * kLine);
}

size_t coded_segment(size_t asked, const Speed& speed) {
  return std::max<size_t>(1, plain_segment(asked, speed) / sizeof(float));
}

}  // namespace pycomm
