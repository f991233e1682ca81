// Choice between one shot and two for a coded all-reduce. In one shot every rank gets all
// contributions, sums them, and encodes and decodes the sum as its owner would: one round in place
// of two, for more work, and from three ranks on for more bytes. Results are the same.
#pragma once
#include "collectives/coded/layout.h"
#include "collectives/common/select.h"

namespace pycomm::coded {

/// The costs of a coded all-reduce of ranks that are far from each other.
struct ShotCosts {
  double one, two;  ///< seconds
};

/// `payload` is the bytes of a rank's `values` encoded once. docs/algorithms.md has the formula.
PYCOMM_API ShotCosts shot_costs(size_t values, size_t payload, int ranks, const Speed& speed);

/// True if `values` of an operation go in one shot: if `wanted` says so, else if ranks are far from
/// each other and it takes less time. Never with a codec whose payloads all ranks get anyway, nor
/// where an owner may have a residual, which other ranks do not know. Equal on all ranks.
bool goes_in_one_shot(const CodedArgs& args, const PieceRuns& values, Algo wanted, int ranks,
                      const Speed& speed);

/// Returns what goes_in_one_shot() decides about all values, and why, in words.
std::string explain(const CodedArgs& args, Algo wanted, int ranks, const Speed& speed);

}  // namespace pycomm::coded
