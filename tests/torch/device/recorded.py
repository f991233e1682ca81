"""What the shipped hooks ask of a device in a step, for the clock of `bench step --stand-in`.

    python -m tests.torch.device.recorded JOB ...

Each JOB is JSON, the arguments of `main`, and a line of what is printed. Two ranks do the same, so
one process is enough: its group answers with what it was given. The device is that of
fake_device.cpp, which notes each call in order; kernels are noted and not run, so values mean
nothing, and sizes everything.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import _C
from pycomm._C import Launch
from pycomm.codecs import convert, implementations
from pycomm.feedback import Feedback
from pycomm.hooks.ddp import HookState, compress_hook
from pycomm.reduction import paths, side_stream
from pycomm.reduction.state import CompressionState
from tests.torch.device import fake_device

FAKE = fake_device.NAME
OPTIMIZERS = {"coded": pycomm.CodedAdamW, "sgd": pycomm.CodedSGD}
STEPS = 3  # of which the last is recorded: before, buckets are made and residuals laid out
VALUES, BYTES = 8, 12  # of a thread, and of memory for each: the value, and its residual

# Kinds of notes beside those of fake_device.cpp.
CALL, EXCHANGE, ANSWER, BUCKET, RETURN, STEP, ARRIVAL = range(7, 14)


def note(kind: int, value: int = 0) -> None:
    torch.ops.fakegpu.note(kind, value)


class NotedKernels(fake_device.Kernels):
    """Launches that are noted, with what they move in memory, by the threads that they have."""

    def launch(self, launches: list[Launch], device: torch.device) -> None:
        for each in launches:
            note(1, each.blocks * _C.CUDA_THREADS * VALUES * BYTES)


class Waiting(dist.Work):
    """An exchange under way, for which the host waits, or with an ordered carrier the stream."""

    ordered: ClassVar[bool] = False

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def wait(self, timeout: Any = None) -> bool:
        if self._number >= 0:
            note(ARRIVAL if self.ordered else ANSWER, self._number)
        return True


class Wire(dist.ProcessGroup):
    """A group of any backend, whose other ranks send what this one does."""

    exchanges: ClassVar[list[tuple[int, int, int]]] = []
    """Of each: bytes out of the device, bytes sent, bytes into the device."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def getBackendName(self) -> str:
        return "standin"

    def _sent(self, out: torch.Tensor, sent: int, came: torch.Tensor) -> Waiting:
        if out.is_cpu:
            return Waiting(-1)
        self.exchanges.append((out.nbytes, sent, came.nbytes))
        note(EXCHANGE, len(self.exchanges) - 1)
        return Waiting(len(self.exchanges) - 1)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Waiting:
        return self._sent(input, input.nbytes - input_sizes[self.rank()], output)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self._sent(input, input.nbytes * (self.size() - 1), output)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Waiting:
        for each in outputs[0]:
            each.copy_(inputs[0])
        return Waiting(-1)

    def allreduce(self, tensors: Any, opts: Any = None) -> Waiting:
        return self._sent(tensors[0], tensors[0].nbytes, tensors[0])

    def broadcast(self, *_: Any) -> Waiting:
        return Waiting(-1)

    barrier = broadcast


class Profile:
    """Notes calls of Python functions, those of this file and what they call left out."""

    def __init__(self) -> None:
        self._ours = 0  # calls under way

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            if self._ours or frame.f_code.co_filename == __file__:
                self._ours += 1
            else:
                note(CALL)
        elif event == "return" and self._ours:
            self._ours -= 1


def go_back() -> None:
    """Put back what the engine has left behind since November 2026.

    Each parameter had launches of its own, reductions ran on the caller's stream, and residuals
    had two bytes a value: here four.
    """
    paths.KERNELS.__dict__["codecs"] = ()
    side_stream.new_stream = torch.accelerator.current_stream
    kept = Feedback.kept
    Feedback.kept = lambda *args: replace(kept(*args), storage="float32")  # type: ignore[method-assign]


def main(
    codec: str,
    buckets: list[list[list[int]]],
    changed: str = "",
    device: str = FAKE,
    carrier: str = "late",
) -> dict[str, Any]:
    """Record a step; return the notes, the exchanges and the path.

    Args:
        codec: of the gradients; "coded sign" and "sgd sign": of the momentum of CodedAdamW, and
            of CodedSGD.
        buckets: of each bucket the shapes of its parameters.
        changed: "before": as in November 2026; "": nothing is.
        device: of the gradients; "cpu": only calls of Python are noted.
        carrier: "late": the host waits for an exchange, as Gloo's do, and pycomm's by the host
            where streams cannot be held; "ordered": the stream does, as NCCL's.
    """
    Waiting.ordered = carrier == "ordered"
    torch.set_num_threads(1)
    fake_device.load("kernels")
    torch.ops.fakegpu.record_calls(True)  # streams do not pause
    implementations.nvrtc = NotedKernels
    # Stands in for the kernel of csrc/codecs/convert.cu.
    noted: Any = {FAKE: lambda c: note(1, c.x.nbytes + c.out.nbytes)}
    select = convert.select
    convert.select = lambda device: noted.get(device) or select(device)
    if changed:
        go_back()
    dist.Backend.register_backend(
        "standin", lambda store, rank, size, timeout: Wire(rank, size), devices=["cpu", FAKE]
    )
    dist.init_process_group("standin", store=dist.HashStore(), rank=0, world_size=2)
    model = nn.Module()
    given: list[tuple[torch.Tensor, list[nn.Parameter]]] = []
    for shapes in buckets:
        parts = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        for part in parts:
            model.register_parameter(f"p{sum(1 for _ in model.parameters())}", part)
        given.append((torch.zeros(sum(p.numel() for p in parts), device=device), parts))
    kind, _, momentum = codec.rpartition(" ")
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = None
    if kind:
        optimizer = OPTIMIZERS[kind](wrapped.parameters(), model=wrapped, codec=momentum)
        state: CompressionState = optimizer.compression
    else:
        state = HookState(codec, wrapped)
    profile = Profile()
    for step in range(STEPS):
        moments = optimizer.momenta.moments if optimizer is not None else {}
        for moment in moments.values() if step else ():
            moment.state["moment_weight"].fill_(1.0)  # kernels would have written it
        torch.ops.fakegpu.record_calls(True)  # from the start again
        take(given, state, optimizer, profile if step == STEPS - 1 else None)
    notes = torch.ops.fakegpu.recorded_calls()
    torch.ops.fakegpu.record_calls(False)
    path = next(one for one in state.summary().splitlines() if one.startswith("path of"))
    return {"notes": notes, "exchanges": Wire.exchanges, "path": path}


def take(
    given: list[tuple[torch.Tensor, list[nn.Parameter]]],
    state: CompressionState,
    optimizer: torch.optim.Optimizer | None,
    profile: Profile | None,
) -> None:
    """Take a step: the hook of each bucket within a backward, then what waits for the results."""

    def hooks(_: torch.Tensor) -> None:
        futures = []
        for i, (tensor, parts) in enumerate(given):
            views = [v.view_as(p) for p, v in zip(parts, split(tensor, parts), strict=True)]
            for part, view in zip(parts, views, strict=True):
                part.grad = view
            bucket: Any = SimpleNamespace(
                buffer=partial(getattr, SimpleNamespace(it=tensor), "it"),
                parameters=partial(list, parts),
                gradients=partial(list, views),
                index=partial(int, i),
                is_last=partial(bool, i == len(given) - 1),
            )
            note(BUCKET, i)
            sys.setprofile(profile)
            futures.append(compress_hook(state, bucket))
            sys.setprofile(None)
            note(RETURN, i)
        for future in futures:
            future.wait()

    loss = torch.ones((), requires_grad=True).clone()
    loss.register_hook(hooks)  # is called within the backward, as those of DDP's reducer
    loss.backward()
    note(STEP, optimizer is not None)
    if optimizer is not None:
        sys.setprofile(profile)
        optimizer.step()
        sys.setprofile(None)


def split(tensor: torch.Tensor, parts: Sequence[nn.Parameter]) -> Sequence[torch.Tensor]:
    return torch.split(tensor, [math.prod(part.shape) for part in parts])


if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    for limit in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        libc.mallopt(limit, 2**31 - 1)  # what is freed is asked for again
    fake_device.built()
    for job in sys.argv[1:]:  # each in a process of its own: what it changes stays changed
        child = os.fork()
        if child == 0:
            print(json.dumps(main(**json.loads(job))), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"the step was not recorded: {job[:80]}")
