// What algorithms cost, and in which pieces a collective over channels travels. Every choice is a
// function of arguments that are equal on all ranks. docs/algorithms.md has the same as a table.
#pragma once
#include <cstddef>
#include <string>

#include "collectives/common/links.h"
#include "collectives/common/topology.h"
#include "core/op.h"

namespace pycomm {

/// Algorithms, in the order of kAlgoNames (core/env.h).
enum class Algo {
  automatic,     ///< the cheapest that keeps the order of sums; over shared memory if it can be
  flat,          ///< the same over channels, as if every rank were a node of its own
  direct,        ///< one_shot or two_shot
  one_shot,      ///< every rank sends to every rank that needs it: one round
  two_shot,      ///< the owner of a chunk reduces or passes it on: two rounds, fewer bytes
  bruck,         ///< all-gather in log2 n rounds
  ring,          ///< two_shot's bytes between neighbours
  tree,          ///< broadcast in log2 n rounds
  hierarchical,  ///< shared memory inside a node, channels between nodes
};

/// Parses a word of kAlgoNames. Throws Error with the list of them.
PYCOMM_API Algo parse_algo(const std::string& word);

/// Medium between two ranks.
enum class Medium { shared_memory, tcp };

/// One collective call, as far as its cost depends on it.
struct Workload {
  Op op;
  int ranks;
  size_t bytes;  ///< in the longest buffer of a rank: all parts together
  Medium medium = Medium::tcp;
  Speed speed = {};
};

/// Work of the busiest rank.
struct Cost {
  double rounds = 0;    ///< messages that wait for each other
  double messages = 0;  ///< sent by it
  double sent = 0;      ///< bytes, or received if that is more
  double folded = 0;    ///< bytes that it reads to reduce or to copy
};

PYCOMM_API double seconds(const Cost& cost, Medium medium, const Speed& speed = {});

/// Returns a time in words: "31 us", "1.5 ms".
std::string time_text(double seconds);

/// True if the group goes node by node. On nodes of several ranks `auto` is hierarchical at every
/// size, since its sums have an order of their own.
bool goes_by_levels(const Topology& topology, Algo wanted);

/// Bytes of a segment of plain elements, and values of a segment of a coded bucket: fewer on slow
/// links, where the time of a segment delays the second of two shots. `asked` is
/// CommunicatorOptions::segment_bytes.
size_t plain_segment(size_t asked, const Speed& speed = {});
size_t coded_segment(size_t asked, const Speed& speed = {});

/// Segments that may be on their way from one peer while earlier ones are folded.
constexpr size_t kReceivesAhead = 4;

}  // namespace pycomm
