// Rooted collectives over a binomial tree: ceil(log2 n) rounds, and no more messages than that at
// the root, instead of n-1 (Thakur, Rabenseifner, Gropp 2005, section 4).
//
//   broadcast   the root's link carries ceil(log2 n) b
//   reduce      contributions travel as they are and the root folds them in rank order: (n-1) b
//
// gather and scatter have no tree: sizes may differ, and only the root knows them.
#pragma once
#include "collectives/algorithms/context.h"
#include "collectives/common/collective.h"

namespace pycomm::tree {

void broadcast(CollectiveContext& context, const Collective& call);
void reduce(CollectiveContext& context, const Collective& call);

}  // namespace pycomm::tree
