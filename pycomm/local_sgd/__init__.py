"""Local SGD with an outer optimizer (DiLoCo): ranks train alone and synchronize every H steps.

Every rank takes H optimizer steps on its own. Then the ranks' outer gradients, start minus end, are
averaged, and an outer SGD with Nesterov momentum moves the common start by the average (Douillard
et al. 2023, "DiLoCo", algorithm 1). With an outer learning rate of 1 and no momentum that is plain
averaging of parameters (local SGD, Stich 2018). Outer gradients are compressed, with feedback.

`LocalSGD` takes one of two forms of exchange:

* `Blocking`: training stops while outer gradients travel.
* `Streamed`: parts of the model travel one after the other while training goes on (Douillard et al.
  2025, "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, algorithm 2).
"""

from pycomm.local_sgd.local import Blocking as Blocking
from pycomm.local_sgd.local import LocalSGD as LocalSGD
from pycomm.local_sgd.local import Streamed as Streamed
