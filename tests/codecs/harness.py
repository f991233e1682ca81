"""What tests of several codecs share: comparison to the bit, errors, and the promises of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec
from pycomm.codecs.cuda.sources import OPTIONS, include_folder, source
from tests.codecs.cuda.ptx import compile_to_ptx, inexact

STEPS = 50
NORMAL = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
"""Values that nobody may change."""


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether values are equal to the bit; NaNs are equal, since their bits may differ."""
    got, want = got.cpu(), want.cpu()
    nan = want.isnan()
    bits = torch.int32 if want.dtype == torch.float32 else torch.int16
    return torch.equal(got.isnan(), nan) and torch.equal(
        got[~nan].view(bits), want[~nan].view(bits)
    )


def code_and_decode(codec: Codec, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return codec.decode(codec.encode(x, **options), x.numel())


def relative_error(codec: Codec, x: torch.Tensor, **options: Any) -> float:
    """Return the square of the error as a part of the square of x."""
    d = code_and_decode(codec, x, **options) - x
    return float(d.double().square().sum() / x.double().square().sum())


def never_sent(codec: Codec, numel: int) -> float:
    """Return the largest part of a sum of normal values over STEPS steps that has neither been
    sent nor is in the residual."""
    g = torch.Generator().manual_seed(3)
    residual = torch.zeros(numel)
    sent, truth = torch.zeros(numel).double(), torch.zeros(numel).double()
    for step in range(STEPS):
        x = torch.randn(numel, generator=g)
        sent += code_and_decode(codec, x, residual=residual, key=RandomKey(step=step))
        truth += x
    return float((sent + residual - truth).abs().max())


def check_ptx(name: str, kernels: Sequence[str], arch: str) -> None:
    """Compile kernels of a file with NVRTC, and check that no instruction contracts or flushes."""
    options = [*OPTIONS, f"-I{include_folder()}", f"-arch=sm_{arch}"]
    ptx = compile_to_ptx(source(name), kernels, options)
    assert ptx.count(".entry") == len(kernels)
    assert inexact(ptx) == []
