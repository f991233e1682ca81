#include "collectives/common/select.h"

#include <algorithm>
#include <cmath>
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

// The terms of the table below: n ranks, b bytes, l = ceil(log2 n) rounds that double.
struct Terms {
  double n, b, l;

  explicit Terms(const Workload& call) : n(call.ranks), b(static_cast<double>(call.bytes)) {
    for (l = 0; std::exp2(l) < n; l++) continue;
  }
  double others() const { return n - 1; }
  double share() const { return b / n; }  // of one rank
};

struct Entry {
  Op op;
  Algo algo;
  Cost (*cost)(const Terms& t);
};

// Of the algorithms of a reduction all but ring sum in rank order, and ring is never the cheapest:
// others send its bytes in fewer rounds.
constexpr Entry kTable[] = {
    {Op::all_reduce, Algo::one_shot,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.b, t.n * t.b}; }},
    {Op::all_reduce, Algo::two_shot,
     [](const Terms& t) -> Cost { return {2, 2 * t.others(), 2 * t.others() * t.share(), t.b}; }},
    {Op::all_reduce, Algo::bruck,
     [](const Terms& t) -> Cost { return {t.l, t.l, t.others() * t.b, (t.n + 1) * t.b}; }},
    {Op::all_reduce, Algo::ring,
     [](const Terms& t) -> Cost {
       return {2 * t.others(), 2 * t.others(), 2 * t.others() * t.share(),
               2 * t.others() * t.share()};
     }},

    {Op::reduce_scatter, Algo::one_shot,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.share(), t.b}; }},
    {Op::reduce_scatter, Algo::ring,
     [](const Terms& t) -> Cost {
       return {t.others(), t.others(), t.others() * t.share(), 3 * t.b};
     }},

    {Op::all_gather, Algo::one_shot,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.share(), 0}; }},
    {Op::all_gather, Algo::bruck,
     [](const Terms& t) -> Cost { return {t.l, t.l, t.others() * t.share(), 2 * t.b}; }},
    {Op::all_gather, Algo::ring,
     [](const Terms& t) -> Cost { return {t.others(), t.others(), t.others() * t.share(), 0}; }},

    {Op::broadcast, Algo::one_shot,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.b, 0}; }},
    {Op::broadcast, Algo::two_shot,
     [](const Terms& t) -> Cost { return {2, 2 * t.others(), 2 * t.others() * t.share(), 0}; }},
    {Op::broadcast, Algo::tree, [](const Terms& t) -> Cost { return {t.l, t.l, t.l * t.b, 0}; }},

    {Op::reduce, Algo::one_shot,
     [](const Terms& t) -> Cost { return {1, t.others(), t.others() * t.b, t.n * t.b}; }},
    {Op::reduce, Algo::two_shot,
     [](const Terms& t) -> Cost { return {2, 2 * t.others(), 2 * t.others() * t.share(), t.b}; }},
    {Op::reduce, Algo::tree,
     [](const Terms& t) -> Cost { return {t.l, t.l, t.others() * t.b, t.n * t.b}; }},

    {Op::barrier, Algo::one_shot, [](const Terms& t) -> Cost { return {1, t.others(), 0, 0}; }},
    {Op::barrier, Algo::bruck, [](const Terms& t) -> Cost { return {t.l, t.l, 0, 0}; }},
};

bool matches(Algo wanted, Algo algo) {
  if (wanted == Algo::direct) return algo == Algo::one_shot || algo == Algo::two_shot;
  return wanted == algo;
}

/// Returns the seconds that a call takes by an entry.
double time_of(const Entry& entry, const Workload& call, const Terms& terms) {
  Cost cost = entry.cost(terms);
  if (entry.op == Op::all_reduce && entry.algo == Algo::two_shot && call.speed.shared > 0) {
    cost.sent = std::min(cost.sent, call.speed.shared * terms.b);
  }
  return seconds(cost, call.medium, call.speed);
}

/// Returns the cheapest entry that allowed(entry) accepts; null if there is none.
template <typename Allowed>
const Entry* cheapest(const Workload& call, const Allowed& allowed) {
  const Terms terms(call);
  const Entry* best = nullptr;
  double least = 0;
  for (const Entry& entry : kTable) {
    if (entry.op != call.op || !allowed(entry)) continue;
    const double time = time_of(entry, call, terms);
    if (best && time >= least) continue;
    best = &entry;
    least = time;
  }
  return best;
}

}  // namespace

Algo parse_algo(const std::string& word) {
  std::string known;
  for (size_t i = 0; i < std::size(kAlgoNames); i++) {
    if (word == kAlgoNames[i]) return static_cast<Algo>(i);
    known += (i == 0 ? "" : ", ") + std::string(kAlgoNames[i]);
  }
  throw Error("unknown algo \"" + word + "\"; use one of " + known);
}

Cost cost(const Workload& call, Algo algo) {
  for (const Entry& entry : kTable) {
    if (entry.op == call.op && entry.algo == algo) return entry.cost(Terms(call));
  }
  throw Error(std::string(name(call.op)) + " has no algorithm " +
              kAlgoNames[static_cast<size_t>(algo)]);
}

double seconds(const Cost& cost, Medium medium, const Speed& speed) {
  Price price = medium == Medium::tcp ? kTcp : kSharedMemory;
  price.round = std::max(price.round, speed.way);
  price.byte = std::max(price.byte, speed.byte);
  return cost.rounds * price.round + cost.messages * price.message + cost.sent * price.byte +
         cost.folded * price.fold;
}

Algo select(const Workload& call, Algo wanted) {
  const Entry* entry = cheapest(call, [&](const Entry& e) { return matches(wanted, e.algo); });
  if (!entry) entry = cheapest(call, [](const Entry&) { return true; });
  return entry ? entry->algo : Algo::one_shot;
}

std::string time_text(double seconds) {
  char text[32];
  const bool long_one = seconds >= 1e-3;
  std::snprintf(text, sizeof text, "%.3g %s", seconds * (long_one ? 1e3 : 1e6),
                long_one ? "ms" : "us");
  return text;
}

std::string explain(const Workload& call, Algo wanted) {
  const Algo taken = select(call, wanted);
  const Terms terms(call);
  std::string first, others;
  for (const Entry& entry : kTable) {
    if (entry.op != call.op) continue;
    const std::string text = std::string(kAlgoNames[static_cast<size_t>(entry.algo)]) + " " +
                             time_text(time_of(entry, call, terms));
    if (entry.algo == taken) {
      first = text;
    } else {
      others += (others.empty() ? "" : ", ") + text;
    }
  }
  if (first.empty()) return "one_shot, its only algorithm";
  return first + (others.empty() ? "" : " (" + others + ")");
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
