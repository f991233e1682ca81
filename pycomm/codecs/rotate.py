"""rotate: a random rotation before a codec with blocks, so that no block has an outlier.

Wire format: docs/wire/rotate.md. The rotation is that of Suresh et al., "Distributed mean
estimation with limited communication" (ICML 2017, section 3): random signs, then Hadamard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.cast import Cast
from pycomm.codecs.philox import derived_seed
from pycomm.codecs.quant import Quant
from pycomm.codecs.rotation import HEADER, check_size, header, rotate, unrotate
from pycomm.codecs.sign import Sign

INNER = Quant(bits=4)


@dataclass(frozen=True)
class Rotate(Codec):
    """Blocks of ``size`` values are rotated, and the result goes through the inner codec."""

    name: ClassVar[str] = "rotate"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 2  # also increases with that of any inner codec

    size: int = 1024
    inner: Codec = INNER

    def __post_init__(self) -> None:
        check_size("rotate", self.size)
        if not isinstance(self.inner, (Cast, Quant, Sign)):
            spec = self.inner.spec()
            raise ValueError(f"rotate: {spec} cannot follow a rotation: use cast, quant or sign")

    def spec(self) -> str:
        return f"rotate:size={self.size}+{self.inner.spec()}"

    @property
    def granule(self) -> int:
        return max(self.size, self.inner.granule)

    @property
    def shared_seed(self) -> bool:
        return self.inner.shared_seed

    def sign_key(self, key: RandomKey) -> int:
        """Return the key of the signs, with which a payload starts."""
        return derived_seed(key, 0)

    def encoded_bytes(self, numel: int) -> int:
        rotated = -(-numel // self.size) * self.size
        return HEADER + self.inner.encoded_bytes(rotated) if numel else 0

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        if p.numel() == 0:
            return p.new_empty(0, dtype=torch.uint8)
        head = header(key, index, p.device)
        rows = rotate(p, head, self.size)
        return torch.cat((head, self.inner.reference_encode(rows.view(-1), key, index)))

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, device=payload.device, dtype=torch.float32)
        rotated = -(-numel // self.size) * self.size
        rows = self.inner.reference_decode(payload[HEADER:], rotated).view(-1, self.size)
        return unrotate(rows, payload[:HEADER], numel)
