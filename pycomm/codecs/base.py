"""The codec interface. `pycomm.codecs.implementations` selects the code that runs a codec.

A codec is defined by its wire page (docs/wire/), its options (a frozen dataclass) and its
reference in plain torch, the two ``reference_*`` methods. Every implementation must write the same
bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.utils.dlpack import from_dlpack

from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.implementations import Implementation, native_codec, select

if TYPE_CHECKING:
    from pycomm import _C

# How the payloads of several ranks are combined: docs/architecture.md, "Combining payloads".
Combine = Literal["recode", "gather"]
# A tensor, or any object that torch.from_dlpack takes without a copy, such as a CuPy array.
Array = Any


@dataclass(frozen=True)
class Codec(ABC):
    """A stateless map between float32 values and wire bytes.

    A subclass is a frozen dataclass of its options and holds the reference.
    """

    name: ClassVar[str]
    combine: ClassVar[Combine]
    wire_version: ClassVar[int]

    def spec(self) -> str:
        """Return the canonical text: equal text, equal bytes. Options of 0 or "" are left out."""
        options = [(f.name, getattr(self, f.name)) for f in fields(self)]
        text = ",".join(f"{name}={value}" for name, value in options if value not in (0, ""))
        return f"{self.name}:{text}" if text else self.name

    @property
    @abstractmethod
    def granule(self) -> int:
        """Number of values at whose multiples a tensor may be cut for encoding; 0: nowhere."""

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Return the exact payload size, a multiple of 4; the largest one if ``variable``."""

    @property
    def variable(self) -> bool:
        """True if payloads start with a uint32: the number of bytes used, a multiple of 4."""
        return False

    @property
    def unbiased(self) -> bool:
        """True if decoded values are right on average over all keys, and far off in each payload.

        Such errors cancel without feedback. Feedback needs a codec that always comes closer; this
        one may overshoot, so residuals would grow.
        """
        return False

    def implementation(self, device: str) -> Implementation:
        """Return the implementation that runs this codec on a device type."""
        return select(self.name, device)

    @abstractmethod
    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        """Return the payload (uint8) of ``p`` (float32 [numel])."""

    @abstractmethod
    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the values (float32 [numel]) of a payload (uint8)."""

    def reference_decode_add(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Add the values of a payload to ``out`` (float32 [numel])."""
        out += self.reference_decode(payload, out.numel())

    @property
    def native(self) -> _C.Codec:
        """The codec in C++, for callers that have addresses."""
        return native_codec(self.spec())

    def encode(
        self,
        x: Array,
        out: Array | None = None,
        residual: Array | None = None,
        *,
        new_residual: Array | None = None,
        key: RandomKey = RandomKey(),
        index: int = 0,
    ) -> torch.Tensor:
        """Encode ``x``, with error feedback if there is a residual, in one pass.

        With a residual: p = x + residual, out = code(p), new_residual = p - decode(out). Where
        decode(out) is not finite the residual stays as it was.

        Args:
            x: float32, any shape, contiguous.
            out: uint8 [encoded_bytes(x.numel())] for the payload; None: a new tensor.
            residual: float32, as many values as ``x``; the error left by earlier payloads.
            new_residual: tensor for the new residual; None: ``residual`` itself.
            key: key of the random numbers, for stochastic rounding.
            index: index of ``x[0]`` in its tensor, a multiple of ``granule``.

        Returns:
            The payload in ``out``. Of one of a codec that is `variable`, such as "lossless", only
            the first `used_bytes` have to be sent.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong size, device, layout or index.

        Example:
            >>> import torch, pycomm
            >>> int8 = pycomm.codec("int8")
            >>> payload = int8.encode(torch.tensor([1.0, -2.0, 0.5]))
            >>> payload.numel()
            8
            >>> int8.decode(payload, 3)
            tensor([ 1.0079, -2.0000,  0.5039])
        """
        x = _floats("x", x)
        if out is None:
            out = torch.empty(self.encoded_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        else:
            out = self._payload("out", out, x)
        if residual is None:
            if new_residual is not None:
                raise ValueError(f"{self.name}: new_residual without residual; pass zeros at first")
        else:
            residual = _floats("residual", residual, like=x)
            new_residual = residual if new_residual is None else new_residual
            new_residual = _floats("new_residual", new_residual, like=x)
        if index < 0 or (index % self.granule if self.granule else index):
            where = f"a multiple of {self.granule}" if self.granule else "0"
            raise ValueError(f"{self.name}: index {index} is not {where}: cut tensors only there")
        args = EncodeArgs(x, out, residual, new_residual, key, index)
        self.implementation(x.device.type).encode(self, args)
        return args.out

    def decode(self, payload: Array, out: int | Array) -> torch.Tensor:
        """Return the values of a payload.

        Args:
            payload: uint8 [encoded_bytes(number of values)].
            out: number of values, or a float32 tensor that is overwritten.

        Returns:
            ``out``, or a new tensor of one dimension, in float32.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong size, device or layout.
        """
        code = _tensor(payload)
        if isinstance(out, int):
            out = torch.empty(out, dtype=torch.float32, device=code.device)
        values = _floats("out", out)
        code = self._payload("payload", code, values)
        self.implementation(values.device.type).decode(self, code, values, add=False)
        return values

    def decode_add(self, payload: Array, out: Array) -> torch.Tensor:
        """Add the values of a payload to ``out`` (float32, in place), and return it.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong size, device or layout.
        """
        values = _floats("out", out)
        code = self._payload("payload", payload, values)
        self.implementation(values.device.type).decode(self, code, values, add=True)
        return values

    def used_bytes(self, payload: Array) -> int:
        """Return how many bytes of a payload have to be sent, a multiple of 4.

        That is the whole payload, except for a codec that is ``variable``, whose payload begins
        with this number; it waits for a payload on a device.

        Args:
            payload: uint8, as `encode` returns it.

        Raises:
            ValueError: the number is none that a payload of this codec can have.

        Example:
            >>> import torch, pycomm
            >>> lossless = pycomm.codec("lossless")
            >>> payload = lossless.encode(torch.zeros(1 << 16))
            >>> lossless.used_bytes(payload) < payload.numel()
            True
        """
        code = _tensor(payload)
        if not self.variable:
            return code.numel()
        used = int(code[:4].view(torch.int32).item()) & 0xFFFFFFFF if code.numel() >= 4 else 0
        if used < 4 or used % 4 or used > code.numel():
            raise ValueError(
                f"{self.spec()}: a payload's header says that it has {used} bytes, and multiples "
                f"of 4 up to {code.numel()} are possible"
            )
        return used

    def _payload(self, role: str, payload: Array, values: torch.Tensor) -> torch.Tensor:
        code = _tensor(payload)
        want = self.encoded_bytes(values.numel())
        if code.dtype != torch.uint8:
            raise TypeError(f"{self.name}: {role} must be uint8, not {code.dtype}")
        if code.numel() != want:
            raise ValueError(
                f"{self.spec()}: {role} has {code.numel()} bytes, "
                f"but {values.numel()} values take {want}"
            )
        if not code.is_contiguous() or code.data_ptr() % 4:
            raise ValueError(f"{self.name}: {role} must be contiguous and start at a multiple of 4")
        _check_device(role, code, values)
        return code


def _tensor(x: Array) -> torch.Tensor:
    tensor: torch.Tensor = x if isinstance(x, torch.Tensor) else from_dlpack(x)
    return tensor


def _floats(role: str, x: Array, like: torch.Tensor | None = None) -> torch.Tensor:
    floats = _tensor(x)
    if floats.dtype != torch.float32:
        raise TypeError(f"{role} must be float32, not {floats.dtype}: convert it with .float()")
    if not floats.is_contiguous() or floats.is_neg():  # C++ reads what lies in memory
        raise ValueError(f"{role} must be contiguous: call .resolve_neg().contiguous() first")
    if like is not None:
        if floats.numel() != like.numel():
            raise ValueError(f"{role} has {floats.numel()} values, x has {like.numel()}")
        _check_device(role, floats, like)
    return floats.detach()


def _check_device(role: str, x: torch.Tensor, like: torch.Tensor) -> None:
    if x.device != like.device:
        raise ValueError(f"{role} is on {x.device} and the values are on {like.device}: move one")
