// Exceptions: one type per way in which a caller can react.
#pragma once
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/op.h"
#include "core/types.h"

namespace pycomm {

/// Any failure; also bad arguments, which are found before a byte is sent.
class PYCOMM_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A deadline passed. The text names the missing ranks.
class PYCOMM_API Timeout : public Error {
 public:
  explicit Timeout(const std::string& what, std::vector<int> waited_for = {})
      : Error(what), waited_for(std::move(waited_for)) {}
  std::vector<int> waited_for;  ///< ranks in the group from which nothing arrived; empty: not known
};

/// A rank died or closed its connection.
class PYCOMM_API PeerLost : public Error {
 public:
  PeerLost(int rank, const std::string& what, std::vector<int> ranks)
      : Error(what), rank(rank), ranks(std::move(ranks)) {}
  int rank;                ///< its number in the group
  std::vector<int> ranks;  ///< all that are known to be gone, `rank` among them, ascending
};

/// Two ranks made different calls: op, order, dtype, size, codec or version.
class PYCOMM_API WireMismatch : public Error {
 public:
  using Error::Error;
};

}  // namespace pycomm
