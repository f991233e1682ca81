"""How every kernel starts: on the device of its tensors, and with each operation rounded alone."""

from __future__ import annotations

from typing import Any

import torch

# Without this option Triton contracts a product and a sum into one rounding, which changes bytes.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run ``programs`` instances of ``kernel`` on torch's current stream; none is fine."""
    if programs == 0:
        return
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[(programs,)](*args, **constants, **OPTIONS)


def as_int32(word: int) -> int:
    """The int32 with the bits of an unsigned word, so that a kernel has one signature."""
    return word - (1 << 32) if word >> 31 else word
