// What every rank was doing when a group failed, in a few lines: ranks in the same state share one.
#pragma once
#include <string>
#include <vector>

#include "transports/transport.h"

namespace pycomm {

struct Report {
  int rank = 0;                 ///< who reports
  std::vector<Sighting> ranks;  ///< all of the group, the reporter included
  std::vector<int> waited_for;  ///< by the reporter
  bool mismatch = false;        ///< calls differ; else somebody did not come, or is gone
};

/// Lines that each begin with "\n  ", those who are to blame first:
///
///   rank 2 is missing: in no operation, last completed barrier #1
///   ranks 0-1, 3 wait: in all_reduce #2 (sum of 10 float64), last completed barrier #1
PYCOMM_API std::string table(const Report& report);

/// "ranks 0-2, 4", of ranks in order.
std::string rank_list(const std::vector<int>& ranks);

}  // namespace pycomm
