"""Products of matrices that nothing rounds."""

from __future__ import annotations

import torch


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b in the dtype of both, also where a training loop is inside of autocast.

    Autocast computes products in 16 bits, but leaves alone what has an ``out`` (torch's "Automatic
    Mixed Precision", "Op Eligibility").
    """
    return torch.matmul(a, b, out=a.new_empty(0))
