"""Averages of votes: values of +1 and -1, one bit each, counted exactly.

All ranks get all votes, or the owner of an element answers with the result, whichever sends fewer
bytes (`pycomm.reduction.single_coding`). The number of votes of n ranks has 2 log2(n + 1) values at
most, of which only every second one can occur, so that an answer in 4 bits is exact for 13 ranks
and one in 8 bits for 253. All ranks get the same bits, which do not depend on the way.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec
from pycomm.optim.own_state import OwnState
from pycomm.policy import Policy
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.reducer import completed
from pycomm.reduction.single_coding import SingleCoding

BALLOT = "sign"
"""Codec of the votes: blocks of values of magnitude 1 have the scale 1, so that all are exact."""

_EXACT_COUNTS = ((13, "int4"), (253, "int8"))  # most ranks whose counts a codec tells apart


class Votes(OwnState):
    """The exchange of votes; each rank keeps its momentum for itself.

    Args:
        majority: the result is the sign of the average, and 0 for equally many votes; else it is
            the average itself.
        process_group: the ranks that vote.
    """

    def __init__(self, *, majority: bool, process_group: dist.ProcessGroup) -> None:
        policy = Policy(BALLOT, rules=(), guard=None)
        super().__init__(policy, process_group=process_group, feedback=None)
        self._majority = majority

    @property
    def answer(self) -> Codec:
        """Codec of an owner's results, which are exact in it."""
        ranks = self.process_group.size()
        if self._majority:  # of an odd number of ranks there is always one
            return parse_codec("sign" if ranks % 2 else "quant:bits=2")
        found = (text for most, text in _EXACT_COUNTS if ranks <= most)
        return parse_codec(next(found, "fp32"))

    def _reduce_coded(
        self, tensor: torch.Tensor, bucket: Bucket
    ) -> torch.futures.Future[torch.Tensor]:
        if bucket.single is None:
            refine = torch.Tensor.sign_ if self._majority else None
            bucket.single = SingleCoding(
                bucket, self.process_group, answer=self.answer, refine=refine
            )
        self._use(bucket.pieces, bucket, tensor)
        single: SingleCoding = bucket.single
        finite = single.average(tensor, bucket, seed=self.seed, step=self.step)
        self._finite.append(lambda: bool(finite))
        if self._majority:
            tensor.sign_()
        else:
            self._count(tensor)
        return completed(tensor)

    def _count(self, means: torch.Tensor) -> None:
        """Round decoded means to the counts that are possible, n, n - 2, ... -n, of n."""
        ranks = self.process_group.size()
        means.add_(1).mul_(ranks / 2).round_()  # votes for +1
        means.mul_(2).sub_(ranks).div_(ranks)
