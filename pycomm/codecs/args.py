"""Arguments of an encode beside the codec: the key of its random numbers, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RandomKey:
    """Key of every random number of one encode, together with a value's index in its tensor."""

    seed: int = 0  # 64 bits
    step: int = 0  # 32 bits
    tensor: int = 0  # 32 bits: number of the parameter

    def __post_init__(self) -> None:
        for name, bits in (("seed", 64), ("step", 32), ("tensor", 32)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"RandomKey: {name}={value} does not fit in {bits} unsigned bits")


@dataclass(frozen=True, eq=False)
class EncodeArgs:
    """Tensors that one encode reads and writes, already checked; C++ has a struct of this name."""

    x: torch.Tensor  # float32, any shape, contiguous
    out: torch.Tensor  # uint8 [encoded_bytes(x.numel())]
    residual: torch.Tensor | None  # float32, x.numel() values
    new_residual: torch.Tensor | None  # may be `residual`; None iff `residual` is None
    key: RandomKey
    index: int  # index of x[0] in its tensor, a multiple of granule

    def addresses(self) -> dict[str, Any]:
        """Return the arguments as C++ takes them (``_C.Codec.encode``), without the stream."""
        return {
            "x": self.x.data_ptr(),
            "numel": self.x.numel(),
            "out": self.out.data_ptr(),
            "error": tuple(
                0 if side is None else side.data_ptr()
                for side in (self.residual, self.new_residual)
            ),
            "seed": self.key.seed,
            "step": self.key.step,
            "tensor": self.key.tensor,
            "index": self.index,
        }
