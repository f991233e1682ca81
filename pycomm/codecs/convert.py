"""Conversion of gradients from one float dtype to another, with scaling, in one pass over memory.

It unscales and clips gradients that AMP has scaled. Communication hooks finish a collective with
it: averaged, in the bucket's own dtype. The arithmetic is that of csrc/codecs/convert.h; the
implementation is selected as for codecs (`pycomm.codecs.implementations`), and all write the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.codecs import implementations
from pycomm.codecs.implementations import Native, Reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Factor = float | torch.Tensor


@dataclass(frozen=True)
class Conversion:
    """Arguments of one conversion, checked by `convert`."""

    x: torch.Tensor
    out: torch.Tensor
    by: Factor = 1.0
    clip: Factor = 1.0
    divisor: float = 1.0
    found_inf: torch.Tensor | None = None


Run = Callable[[Conversion], None]


def convert(
    x: torch.Tensor,
    out: torch.Tensor | torch.dtype | None = None,
    *,
    by: Factor = 1.0,
    clip: Factor = 1.0,
    divisor: float = 1.0,
    found_inf: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply, divide and cast gradients, and report overflow.

    ``out = cast(x * by * clip / divisor)``, in float32 with each operation rounded alone. One pass
    over the gradients replaces several (unscale, look for Inf and NaN, clip, cast). Nothing waits
    for the device: factors and flag can be tensors there.
    Args:
        x: float32, float16 or bfloat16, any shape, contiguous.
        out: as many values of one of these dtypes, contiguous; or the dtype of a new tensor; None:
            ``x`` itself.
        by: a number, or float32 with one value on the device of ``x``: the reciprocal of the loss
            scale.
        clip: the same: the maximum norm over the norm, if that is below 1.
        divisor: a number, such as the number of ranks in the sum.
        found_inf: float32 with one value, on the device of ``x``. Set to 1 if a value of the
            result is Inf or NaN, also if only the cast made it so; else left unchanged, so that
            several tensors can share it. Optimizers with ``found_inf`` take it.

    Returns:
        ``out``.

    Raises:
        TypeError: an unsupported dtype.
        ValueError: a wrong size, device or layout.

    Example:
        >>> import torch, pycomm
        >>> found_inf = torch.zeros(1)
        >>> gradients = torch.tensor([1024.0, -512.0], dtype=torch.float16)
        >>> pycomm.convert(gradients, torch.float32, by=1 / 1024, found_inf=found_inf)
        tensor([ 1.0000, -0.5000])
        >>> found_inf
        tensor([0.])
    """
    if out is None:
        out = x
    elif isinstance(out, torch.dtype):
        out = torch.empty_like(x, dtype=out)
    for role, tensor in (("x", x), ("out", out)):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{role} must be float32, float16 or bfloat16, not {tensor.dtype}")
        if not tensor.is_contiguous() or tensor.is_neg():
            raise ValueError(f"{role} must be contiguous: call .resolve_neg().contiguous() first")
        if tensor.numel() != x.numel() or tensor.device != x.device:
            raise ValueError(
                f"out has {out.numel()} values on {out.device}, x has {x.numel()} on {x.device}"
            )
    for role, factor in (("by", by), ("clip", clip), ("found_inf", found_inf)):
        if isinstance(factor, torch.Tensor):
            _check_single(role, factor, x)
    run = select(x.device.type)
    run(Conversion(x.detach(), out.detach(), by, clip, float(divisor), found_inf))
    return out


def _check_single(role: str, factor: torch.Tensor, x: torch.Tensor) -> None:
    if factor.dtype != torch.float32 or factor.numel() != 1 or factor.device != x.device:
        raise ValueError(
            f"{role} must be float32 with one value on {x.device}, not {factor.dtype} with "
            f"{factor.numel()} on {factor.device}"
        )


# ---------------------------------------------------------------- implementations


def reference(c: Conversion) -> None:
    """Run a conversion in plain torch; this is the definition."""
    value = c.x.reshape(-1).float()
    for factor in (c.by, c.clip):
        value = value * torch.as_tensor(factor, dtype=torch.float32, device=value.device)
    # torch would replace division by a number with multiplication by its reciprocal.
    value = value / value.new_tensor(c.divisor).expand_as(value)
    c.out.view(-1).copy_(value)
    if c.found_inf is not None:
        c.found_inf.masked_fill_(~c.out.isfinite().all(), 1.0)


def _call(c: Conversion) -> Callable[..., object]:
    """Return the call of csrc/codecs/convert.cpp, which launches convert.cu on a device."""
    return partial(
        _C.convert,
        c.x.data_ptr(),
        core_dtype(c.x.dtype),
        c.out.data_ptr(),
        core_dtype(c.out.dtype),
        c.x.numel(),
        by=_factor(c.by),
        clip=_factor(c.clip),
        divisor=c.divisor,
        found_inf=0 if c.found_inf is None else c.found_inf.data_ptr(),
    )


def _factor(factor: Factor) -> tuple[int, float]:
    """Return an address, or 0 and the number that is used instead."""
    return (factor.data_ptr(), 1.0) if isinstance(factor, torch.Tensor) else (0, factor)


def _run_of(way: Any) -> Run:
    """Return the conversion that belongs to an implementation of codecs."""
    if isinstance(way, Reference):
        return reference
    if isinstance(way, Native):
        return lambda c: way.call(c.x, _call(c))
    run: Run = way.convert
    return run


def implementation(kind: str, device: str) -> Run:
    """Return one implementation for a device type; raises as `implementations.implementation`."""
    return _run_of(implementations.implementation("convert", kind, device))


def select(device: str) -> Run:
    """Return the first available implementation, or the one that PYCOMM_IMPL names.

    Raises:
        Unavailable: the named one is not available; the text has the reason.
    """
    return _run_of(implementations.select("convert", device))
