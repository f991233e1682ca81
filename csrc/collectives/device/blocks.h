// BlockShare: how many thread blocks the groups of a process may start on a GPU.
//
// Kernels of ranks wait for each other, so they must run at once, and on each GPU groups may start
// theirs in another order: if the blocks of some groups fill it, those of another group would wait
// for blocks that wait for them. So all groups of a process share the capacity of a GPU, and a
// block that is given to one group is not given to another while the first lives.
#pragma once
#include "core/types.h"

namespace pycomm::device {

class PYCOMM_API BlockShare {
 public:
  /// Takes at most `most` blocks of `room` on GPU `index`. Groups after the first take at most half
  /// of what is left, so that later ones find some, and at least 1: with none they could do
  /// nothing.
  BlockShare(int index, int room, int most);
  ~BlockShare();
  BlockShare(const BlockShare&) = delete;
  BlockShare& operator=(const BlockShare&) = delete;

  int count() const { return count_; }
  /// Returns all blocks but `count`.
  void shrink(int count);

 private:
  const int index_;
  int count_;
};

}  // namespace pycomm::device
