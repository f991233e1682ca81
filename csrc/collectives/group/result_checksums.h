// ResultChecksums: a few bytes of checksums in the tag of the next operation, over data that all
// ranks must hold alike: the result of the last one, and what callers name, such as parameters.
// PYCOMM_CHECK=results.
#pragma once
#include <string>
#include <vector>

#include "collectives/common/parts.h"
#include "core/op.h"
#include "transports/transport.h"

namespace pycomm {

/// Parses the checks that a group makes; throws Error for words other than "none" and "results".
bool checks_results(const std::string& word);

/// CRC-32C of the first `count` parts, one after another; never 0.
PYCOMM_API uint32_t digest(const Parts& parts, int count, uint32_t before = 0);

/// A result that is the same on all ranks: its first `count` parts; 0 if there is none.
struct ReplicatedResult {
  Parts parts;
  int count = 0;
};

/// Checksums of one group, used by the thread that runs a collective. Does nothing if it is not on.
class ResultChecksums {
 public:
  explicit ResultChecksums(bool on) : on_(on) {}
  bool on() const { return on_; }

  /// `digest`, not 0, is to be equal on all ranks; replaces the one before.
  void compare(std::string what, uint32_t digest);
  /// Keeps the result that a call has ended with.
  void keep(const OpTag& tag, const ReplicatedResult& result);
  /// Writes the checksums into the tag of the call that begins now: tags that differ are detected
  /// anyway.
  void stamp(OpTag& tag) const {
    tag.result = result_;
    tag.state = state_;
  }

  /// If the calls of all ranks that can be seen differ in their checksums alone, returns what
  /// differs, on which ranks, and what to do. Else empty.
  std::string verdict(int rank, const std::vector<PeerStatus>& ranks) const;

 private:
  bool on_;
  OpTag call_;  ///< the call that had the result
  std::string what_;
  uint32_t result_ = 0, state_ = 0;
};

}  // namespace pycomm
