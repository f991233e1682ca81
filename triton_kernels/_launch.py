"""Launch of every kernel: on its tensors' device, with each operation rounded separately."""

from __future__ import annotations

from typing import Any

import torch

# Without this option Triton fuses a product and a sum into one rounding, which changes bytes.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run ``programs`` instances of ``kernel`` on torch's current stream; 0 is allowed."""
    if programs == 0:
        return
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[(programs,)](*args, **constants, **OPTIONS)


def sections(
    codec: Any, payload: torch.Tensor, numel: int, dtype: torch.dtype = torch.uint8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of blocks, and the codes in words of a dtype."""
    start = 4 * -(-numel // codec.block)
    return payload[:start].view(torch.float32), payload[start:].view(dtype)


def as_int32(word: int) -> int:
    """Return the int32 with the bits of an unsigned word, so that kernels have one signature."""
    return word - (1 << 32) if word >> 31 else word
