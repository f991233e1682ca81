"""Encoding with feedback in torch: reads the residual of earlier steps and writes the new one.

The order of operations is that of `encode` in csrc/codecs/base/feedback.cpp, so the bits are the
same.
"""

from __future__ import annotations

import torch

from pycomm.codecs import Codec, RandomKey
from pycomm.feedback import storage
from pycomm.feedback.residual import Residual

_KEY = RandomKey()


def encode(
    codec: Codec,
    x: torch.Tensor,
    out: torch.Tensor,
    residual: Residual,
    *,
    worker: bool,
    begin: int,
    row: int = 0,
    key: RandomKey = _KEY,
) -> None:
    """Encode values of a parameter with its residual.

    Args:
        codec: codec of the payload.
        x: float32 [numel of the run].
        out: uint8 [bytes of the payload].
        residual: residual of the whole parameter.
        worker: encode a contribution; else an owner's result, whose feedback is of the kind
            residual.
        begin: index of x[0] in the parameter.
        row: row of the residual.
        key: selects the random numbers.
    """
    rule, kind = residual.rule, residual.rule.kind if worker else "residual"
    end = begin + x.numel()

    def stored(role: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the values of a buffer before and after this step; None: there is none."""
        if getattr(residual, role, None) is None:
            return None, None
        now, then = (residual.stored(role, side, row, begin, end) for side in residual.sides)
        return now, then

    old, fresh = stored("worker" if worker else "owner")
    old_u, fresh_u = stored("momentum" if worker else "")
    p, e, u, left = x, None, None, None
    if old is not None and fresh is not None:
        e = storage.load(old, x.numel())
        e = e * rule.decay if kind == "decay" else e
        # The codec writes a float32 residual directly, if feedback does not transform it.
        direct = fresh.dtype == torch.float32 and kind != "momentum"
        left = fresh if direct else torch.empty_like(x)
    if old_u is not None:
        p = u = storage.load(old_u, x.numel()) * rule.decay + x
    codec.encode(p, out, e, new_residual=left, key=key, index=begin)
    if left is not None and e is not None and fresh is not None:
        if u is not None:
            u = torch.where(left == p + e, u, 0.0)
        if left is not fresh:
            storage.store(left, fresh)
    if u is not None and fresh_u is not None:
        storage.store(u, fresh_u)
