// What all ranks must hold alike, in a few bytes that travel in the tag of the next operation: the
// result of the last one, and what callers name, such as parameters. PYCOMM_CHECK=results.
#pragma once
#include <string>
#include <vector>

#include "collectives/parts.h"
#include "core/op.h"
#include "transports/transport.h"

namespace pycomm {

/// Which checks a group makes; throws Error for words other than "none" and "results".
bool checks_results(const std::string& word);

/// CRC-32C of the first `count` parts, one behind another; never 0.
PYCOMM_API uint32_t digest(const Parts& parts, int count, uint32_t before = 0);

/// A result that is the same on all ranks: its first `count` parts; 0 if there is none.
struct Alike {
  Parts parts;
  int count = 0;
};

/// Used by the thread that runs a collective. Does nothing if it is not on.
class Digests {
 public:
  explicit Digests(bool on) : on_(on) {}
  bool on() const { return on_; }

  /// `digest`, not 0, is to be equal on all ranks; replaces the one before.
  void compare(std::string what, uint32_t digest);
  /// What a call has ended with.
  void keep(const OpTag& tag, const Alike& result);
  /// Into the tag of the call that begins now: tags that differ are found anyway.
  void stamp(OpTag& tag) const {
    tag.result = result_;
    tag.state = state_;
  }

  /// In words, if the calls of all ranks that can be seen differ in their digests alone: what
  /// differs, on which of them, and what to do. Else empty.
  std::string verdict(int rank, const std::vector<Sighting>& ranks) const;

 private:
  bool on_;
  OpTag call_;  ///< whose result it is
  std::string what_;
  uint32_t result_ = 0, state_ = 0;
};

}  // namespace pycomm
