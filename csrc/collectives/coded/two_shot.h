// TwoShot: the schedule of every coded operation (coded.h), over how payloads move (exchange.h) and
// who codes them (coder.h). Each rank
//
//   1. encodes its contributions for the owners of chunks, and what it shows to all;
//   2. makes the results of its chunk when the contributions have come, and sends them to all;
//   3. decodes the results, and adds up what the others show.
//
// Of a reduce_scatter only the contributions travel; of values that are coded once
// (pycomm/reduction/single_coding.py) only the results, which are then what each rank contributes
// to its own chunk. Segments that are there are decoded while others are waited for.
#pragma once
#include "collectives/coded/coder.h"
#include "collectives/coded/exchange.h"

namespace pycomm::coded {

class PYCOMM_API TwoShot {
 public:
  TwoShot(Exchange& exchange, Coder& coder, const Plan& plan);
  void run();

 private:
  void contribute();
  void show();
  /// Makes segment s of our chunk.
  void own(size_t s);
  /// Decodes what has come; returns true once all of the stage has.
  bool land();
  bool land_from(int owner);
  bool land_shown();
  /// Returns true once segment s of all other ranks' payloads has come.
  bool have_all(Shot shot, size_t s);
  /// Lists the payloads of all ranks for a segment in received_.
  void collect(Shot shot, size_t s);
  size_t in_stage(size_t count) const { return std::min(count, last_); }

  Exchange& exchange_;
  Coder& coder_;
  const Plan& plan_;
  const int n_, me_;
  size_t first_ = 0, last_ = 0;      ///< segments of each chunk in this stage
  std::vector<size_t> landed_;       ///< per owner: segments of the result
  size_t results_ = 0;               ///< of all owners, here and at other places
  size_t shown_ = 0, added_up_ = 0;  ///< segments of what is shown
  std::vector<Received> received_;
};

}  // namespace pycomm::coded
