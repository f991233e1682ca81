// Coded collectives: floats travel encoded; in between they are float32. An all-reduce takes two
// shots:
//
//   1. every rank encodes its contribution, with its worker residual, and sends each owner its
//      chunk;
//   2. the owner decodes all contributions in rank order into a float32 sum, divides it once,
//      encodes the result with its owner residual, and sends that to all; every rank decodes
//      the same bytes.
//
// The owner's own contribution is coded like the others', so a result does not depend on which rank
// owns it. There are two codings whatever the number of ranks: with v the relative squared error of
// one, the result has about 2v (a ring that recodes at each hop has v(n+1)/2).
//
// Where no owner has a residual, any rank can be the owner of all, and far ranks then need one
// shot: every rank gets all contributions, sums them, and encodes and decodes the sum as its owner
// would. That is one round in place of two, for more work, and from three ranks on for more bytes.
// Results are the same.
//
// If a codec's combine is `gather`, there is no owner: every rank sends its encoded values to all,
// which decode them in rank order and divide. docs/algorithms.md has the costs.
#pragma once
#include "collectives/algorithms/context.h"

namespace pycomm::coded {

/// Throws Error unless the pieces ascend and cover the values: `rows` times, one after the other.
PYCOMM_API void check(const char* op, const CodedArgs& args, size_t rows);

/// Returns the tag of an operation, with the codec of most of the bucket and a hash of what all
/// ranks must agree on: codecs, wire versions, layout, averaging, seed and step.
OpTag tag_of(Op op, const CodedArgs& args);

/// Number of a hop beside those of the ranks: what owners send back, which must not depend on which
/// rank owns an element.
constexpr int kOwnerHop = -1;

/// Returns the seed of the random numbers in what `rank` sends, or of owners. One step of
/// splitmix64 (Steele, Lea, Flood 2014).
PYCOMM_API uint64_t hop_seed(uint64_t seed, int rank);

/// The costs of a coded all-reduce of ranks that are far from each other.
struct ShotCosts {
  double one, two;  ///< seconds
};

/// `payload` is the bytes of a rank's `values` encoded once. docs/algorithms.md has the formula.
PYCOMM_API ShotCosts shot_costs(size_t values, size_t payload, int ranks, const Speed& speed);

/// Returns whether an all-reduce goes in one shot or two, and why, in words.
std::string explain(const CodedArgs& args, Algo wanted, int ranks, const Speed& speed);

/// Runs an all_reduce or a reduce_scatter, as Communicator::run_coded says. Between
/// nodes of several ranks an all-reduce is exact inside a node, then every rank codes a shard of
/// its node's sum as if nodes were ranks.
bool run(CollectiveContext& context, Op op, Algo wanted, const CodedArgs& args, void* out);

}  // namespace pycomm::coded
