// Parts of pycomm._test that have files of their own, with a function each.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/notice.h"

namespace pycomm {

/// Returns the notice of rank `from` with this kind: error, timeout, mismatch or lost.
inline Notice notice(const std::string& text, const std::string& kind, int from, int rank,
                     std::vector<int> ranks) {
  static constexpr const char* kKinds[] = {"error", "timeout", "mismatch", "lost"};
  const auto found = std::find(std::begin(kKinds), std::end(kKinds), kind);
  if (found == std::end(kKinds)) {
    throw Error("unknown kind \"" + kind + "\" of a notice; use error, timeout, mismatch or lost");
  }
  Notice result = plain_notice(text, from);
  result.kind = static_cast<Notice::Kind>(found - std::begin(kKinds));
  result.rank = rank;
  result.ranks = std::move(ranks);
  return result;
}

void bind_codecs(pybind11::module_& m);      // codecs.cpp: a codec of every kind
void bind_device(pybind11::module_& m);      // device.cpp: groups of ranks on GPUs
void bind_transports(pybind11::module_& m);  // transports.cpp: transports, notices, seals

}  // namespace pycomm
