"""Implementations of codecs: up to four that write the same bytes.

* ``native``: csrc/codecs through ``pycomm._C``; on cuda only if pycomm was built with CUDA.
* ``nvrtc``: the same CUDA sources, compiled at run time: ``pycomm.codecs.cuda.nvrtc``.
* ``triton``: ``pycomm.triton_kernels.<name>``; on cpu only in Triton's interpreter.
* ``reference``: the codec's own ``reference_*`` methods, in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, Protocol

import torch

from pycomm import _C
from pycomm._C import recorded
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.cuda.sources import has_kernels
from pycomm.env import env

Kind = Literal["native", "nvrtc", "triton", "reference"]

ORDER: dict[str, tuple[Kind, ...]] = {
    "cpu": ("native", "reference"),
    "cuda": ("native", "nvrtc", "triton", "reference"),
}


class Unavailable(RuntimeError):
    """The implementation is not part of this installation, or does not run on this device."""


class CodecFunctions(Protocol):
    """The part of a codec that implementations use; see `pycomm.codecs.base`."""

    @property
    def native(self) -> _C.Codec: ...
    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor: ...
    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor: ...
    def reference_decode_add(self, payload: torch.Tensor, out: torch.Tensor) -> None: ...


class Implementation(Protocol):
    """An implementation of a codec's calls."""

    def encode(self, codec: Any, args: EncodeArgs, /) -> None: ...
    def decode(self, codec: Any, payload: torch.Tensor, out: torch.Tensor, /, *, add: bool) -> None:
        """Store the values of a payload in ``out``, or add them to it."""


class Reference:
    """The reference: any codec in plain torch, on any device."""

    def encode(self, codec: CodecFunctions, args: EncodeArgs) -> None:
        x = args.x.reshape(-1)
        if args.residual is None or args.new_residual is None:
            args.out.copy_(codec.reference_encode(x, args.key, args.index))
            return
        residual = args.residual.reshape(-1)
        p = x + residual
        args.out.copy_(codec.reference_encode(p, args.key, args.index))
        value = codec.reference_decode(args.out, p.numel())
        left = torch.where(value.isfinite(), p - value, residual)
        args.new_residual.view(-1).copy_(left)

    def decode(
        self, codec: CodecFunctions, payload: torch.Tensor, out: torch.Tensor, *, add: bool
    ) -> None:
        if add:
            codec.reference_decode_add(payload, out.view(-1))
        else:
            out.view(-1).copy_(codec.reference_decode(payload, out.numel()))


class Launcher(Protocol):
    """Starts launches (`pycomm._C.recorded`) on torch's current stream of a device."""

    def __call__(self, launches: list[Any], device: torch.device) -> None: ...


class Native:
    """The native implementation: pycomm._C; cuda tensors use torch's current stream."""

    launch: Launcher | None = None
    """What starts the kernels that C++ describes; None: C++ does."""

    def encode(self, codec: CodecFunctions, args: EncodeArgs) -> None:
        self._run(codec, args.x, partial(codec.native.encode, **args.addresses()))

    def decode(
        self, codec: CodecFunctions, payload: torch.Tensor, out: torch.Tensor, *, add: bool
    ) -> None:
        call = codec.native.decode_add if add else codec.native.decode
        self._run(codec, out, partial(call, payload.data_ptr(), out.data_ptr(), out.numel()))

    def _run(self, codec: CodecFunctions, x: torch.Tensor, call: Callable[..., object]) -> None:
        on_device = x.is_cuda or self.launch is not None
        # It may be freed as soon as the work is queued: torch's caching allocator gives it to work
        # that comes later on the same stream.
        count = codec.native.scratch_bytes(x.numel()) if on_device else 0
        scratch = torch.empty(count, dtype=torch.uint8, device=x.device)
        self.call(x, partial(call, scratch=scratch.data_ptr()))

    def call(self, x: torch.Tensor, call: Callable[..., object]) -> None:
        """Call C++, which works on the device of ``x``, with its stream."""
        if self.launch is not None:
            self.launch(recorded(partial(call, stream=0)), x.device)
            return
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            call(stream=current_stream(x.device) if x.is_cuda else None)


class Launched(Native):
    """The native implementation, whose kernels something else starts."""

    def __init__(self, launch: Launcher) -> None:
        self.launch = launch


@cache
def native_codec(spec: str) -> _C.Codec:
    """Return the C++ codec."""
    return _C.Codec(spec)


def launcher(codec: Any, device: str) -> Launcher | None:
    """Return what starts the kernels of a codec on a device; None: C++ does."""
    way = codec.implementation(device)
    return way.launch if isinstance(way, Native) else None


def current_stream(device: torch.device) -> int:
    """Return the address of torch's current stream of a cuda device."""
    return torch.cuda.current_stream(device).cuda_stream


def nvrtc() -> Native:
    """Import NVRTC's launches when a codec first needs them: they need CuPy, and the codecs."""
    return Launched(import_module("pycomm.codecs.cuda.nvrtc").launch)


def implementation(name: str, kind: str, device: str) -> Implementation:
    """Return one implementation of the codec ``name`` for a device type ("cpu", "cuda").

    Raises:
        ImportError: it needs something that is not installed.
        Unavailable: it is not built, or does not run on this device.
        ValueError: there is no such kind.
    """
    if kind == "reference":
        return Reference()
    if kind == "native":
        if name not in _C.codec_names() and not has_kernels(name):
            raise Unavailable(f"{name} is not among the codecs in C++")
        if device == "cuda":
            if not _C.cuda_built():
                raise Unavailable("native codecs on cuda: this pycomm was built without CUDA")
            _check_cuda_source(name)
        elif device != "cpu":
            raise Unavailable(f"native codecs run on cpu and cuda, not on {device}")
        return Native()
    if kind == "triton":
        if device == "cpu" and not env().triton_interpret:
            raise Unavailable("triton on cpu runs in its interpreter only: set TRITON_INTERPRET=1")
        module = f"pycomm.triton_kernels.{name}"
        try:
            kernels: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise Unavailable(f"{name} has no kernels in Triton") from None
        return kernels  # type: ignore[no-any-return]
    if kind == "nvrtc":
        if device == "cpu":
            raise Unavailable(f"nvrtc compiles for cuda, not for {device}")
        _check_cuda_source(name)
        return nvrtc()
    raise ValueError(f"unknown implementation {kind!r}: use native, nvrtc, triton or reference")


def _check_cuda_source(name: str) -> None:
    if not has_kernels(name):
        raise Unavailable(f"{name} has no CUDA kernels")


def select(name: str, device: str) -> Implementation:
    """Return the first available implementation, or the one that PYCOMM_IMPL names.

    Raises:
        Unavailable: the named one is not available; the text has the reason.
    """
    return _select(name, device, env().impl)


def of_kernels(name: str, device: str) -> Native | None:
    """Return what runs the CUDA sources of a name on a device, whatever PYCOMM_IMPL names."""
    for kind in ORDER.get(device, ()):
        try:
            way = _select(name, device, kind)
        except Unavailable:
            continue
        if isinstance(way, Native):
            return way
    return None


@cache
def _select(name: str, device: str, wanted: str) -> Implementation:
    reasons = []
    for kind in (wanted,) if wanted else ORDER.get(device, ("reference",)):
        try:
            return implementation(name, kind, device)
        except (ImportError, Unavailable) as e:
            reasons.append(f"{kind}: {e}")
    raise Unavailable(f"no implementation of {name} runs on {device}: " + "; ".join(reasons))
