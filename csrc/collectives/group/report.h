// State of every rank when a group failed, in a few lines: ranks in the same state share one.
#pragma once
#include <string>
#include <vector>

#include "transports/transport.h"

namespace pycomm {

struct Report {
  int rank = 0;                   ///< the reporter
  std::vector<PeerStatus> ranks;  ///< all of the group, the reporter included
  std::vector<int> waited_for;    ///< by the reporter
  bool mismatch = false;          ///< calls differ; else some rank did not join, or is gone
};

/// Lines that each begin with "
///   ", the ranks that are to blame first:
///
///   rank 2 is missing: in no operation, last completed barrier #1
///   ranks 0-1, 3 wait: in all_reduce #2 (sum of 10 float64), last completed barrier #1
PYCOMM_API std::string table(const Report& report);

/// Formats ranks, given in order, as "ranks 0-2, 4".
std::string rank_list(const std::vector<int>& ranks);

}  // namespace pycomm
