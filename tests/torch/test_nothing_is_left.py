"""What holds for all ways to train: nothing is left behind, no setting of the process changes a
result, and nothing is unpickled.
"""

from __future__ import annotations

import gc
import pickle
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import pycomm
import pycomm.horovod as hvd
from pycomm import backend, monitor, trace
from pycomm.communicator import Communicator, Store
from tests.extent import FULL, each_value
from tests.soak.held import COUNTS, held_at_rest
from tests.torch import ways
from tests.torch.harness import Chosen, equal, gradients
from tests.torch.pool import on_ranks

ROUNDS = 20 if FULL else 9
WIDTH = 160  # a model has 100 KiB, and so has its gradient, its residual, its bucket
LEAST = 50  # KiB of each round that count as a leak
Use = Callable[[int, int, int], None]


def until(done: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)


def trained(way: ways.Way, steps: int = 4) -> ways.Training:
    torch.manual_seed(0)
    training = way(nn.Linear(WIDTH, WIDTH))
    for _ in range(steps):
        training.step(lambda net: net(torch.ones(2, WIDTH)).square().mean())
    return training


def use(rank: int, size: int, number: int, *, way: ways.Way, ends: bool = True) -> None:
    training = trained(way)
    if training.state is not None:
        assert training.state.summary()
    if ends:
        training.end()


# ------------------------------------------------------------------ nothing is left
# What pycomm makes, it closes: each public object is made, used and dropped, again and again.
# Threads, descriptors and mappings of shared memory must be as many as before, and the heap as
# large, up to less than what a forgotten model would take in each round.


def a_group(rank: int, size: int, number: int, **options: Any) -> None:
    group = dist.new_group(backend="pycomm", pg_options=pycomm.Options(**options))
    dist.all_reduce(torch.ones(100_000), group=group)
    dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
    if rank == 0:
        dist.send(torch.ones(10), 1, group=group)
    else:
        dist.recv(torch.ones(10), 0, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)


def aborted_group(rank: int, size: int, number: int) -> None:
    group = dist.new_group()
    dist.barrier(group)
    dist.barrier()  # else a rank may abort the group while another is in its barrier
    backend.find(group).abort()  # type: ignore[union-attr]
    with pytest.raises(pycomm.Error):
        dist.barrier(group)
    dist.destroy_process_group(group)


def communicator(rank: int, size: int, number: int, **options: Any) -> None:
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    group = Communicator(Store.file(folder[0]), rank, size, **options)  # not closed: dropped
    values = array("f", [1.0] * 1000)
    group.all_reduce(values)
    group.recv(values, 1 - rank) if rank else group.send(values, 1 - rank).wait()
    group.barrier()
    dist.barrier()


def reconfigured(rank: int, size: int, number: int) -> None:
    """An elastic group, whose members are set twice."""
    store = dist.PrefixStore(f"elastic {number}", dist.distributed_c10d._get_default_store())
    options = pycomm.Options(enable_reconfigure=True)
    options.group_name = f"elastic {number}"
    c10d = backend.load_c10d()
    made = c10d.Backend(store, rank, size, options, f"elastic {number}")
    handles: list[Any] = [None] * size
    dist.all_gather_object(handles, made.handle())
    for uuid in (1, 2):
        made.form(uuid, handles, timedelta(seconds=20))
        made.allreduce([torch.ones(3)]).wait()  # type: ignore[attr-defined]
    dist.barrier()
    made.shutdown()


def horovod(rank: int, size: int, number: int) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(3), name="x")


def observed(rank: int, size: int, number: int) -> None:
    """The monitor and the trace."""
    _training = trained(ways.gradients, 1)
    assert monitor.text()
    with tempfile.TemporaryDirectory() as folder:
        assert all(path.exists() for path in trace.dump(Path(folder) / "trace"))


def codecs(rank: int, size: int, number: int) -> None:
    for name in ("bf16", "int8", "mxfp4", "sign", "eden:bits=2", "topk:0.01", "lossless"):
        codec = pycomm.codec(name)
        values = torch.ones(WIDTH * WIDTH)
        assert codec.decode(codec.encode(values), values.numel()).numel() == values.numel()


USES: dict[str, Use] = {
    "a group": a_group,
    "a group by TCP": partial(a_group, transport="tcp"),
    "an aborted group": aborted_group,
    "a communicator": communicator,
    "a communicator by TCP": partial(communicator, transport="tcp"),
    "an elastic group": reconfigured,
    **{name: partial(use, way=way) for name, way in ways.WAYS.items()},
    **{
        f"{name}, not finished": partial(use, way=ways.WAYS[name], ends=False)
        for name in ("LocalSGD in streams", "LocalSGD on a thread")
    },
    "a call of Horovod": horovod,
    "monitor and trace": observed,
    "codecs": codecs,
}


@on_ranks(2, deadline=120)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "pycomm") for name in USES),
        *((name, "gloo") for name in ("int4", "LocalSGD in streams")),
    ],
)
def test_a_dropped_object_leaves_nothing(rank, size, name):
    use = USES[name]

    def rest(before: dict[str, int] | None = None) -> dict[str, int]:
        """What is held, when threads that end have ended."""
        gc.collect()
        dist.barrier()
        if before is not None:
            until(lambda: all(held_at_rest()[count] <= before[count] for count in COUNTS))
        return held_at_rest()

    for number in range(3):  # what stays for ever comes once
        use(rank, size, number)
    time.sleep(0.2)
    before = rest()
    heaps = [before["heap_kib"]]
    for number in range(3, 3 + ROUNDS):
        use(rank, size, number)
        heaps.append(held_at_rest()["heap_kib"])
    after = rest(before)
    grown = {
        count: (before[count], after[count]) for count in COUNTS if after[count] > before[count]
    }
    assert not grown, grown
    # But for one round: a table of torch's Gloo doubles now and then, by up to 270 KiB at once.
    growths = sorted(b - a for a, b in pairwise([*heaps, after["heap_kib"]]))
    assert sum(growths[:-1]) < LEAST * ROUNDS, heaps


# -------------------------------------------------------------------------- settings of the process
# What a program sets for all of torch changes no result: defaults of new tensors, and autocast.
# `torch.set_default_device("cuda")` is common, `torch.set_default_dtype` is in many a script, and
# in many a loop the backward or the step is inside of autocast. A meta device stands for another
# one here: what is made on it has no values.


@contextmanager
def defaults() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    # Memory that nobody has written is NaN in this mode.
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)


METHODS = ways.WAYS | ways.CODECS


def train(way: ways.Way, net: nn.Module, given: list[dict[str, torch.Tensor]]) -> list[Any]:
    training = way(net)
    for step in given:
        training.step(lambda model, step=step: model(step))
    training.end()
    found = training.model.parameters()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in found]


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "pycomm") for name in METHODS]
    + [(name, "gloo") for name in ("int4", "topk:0.01", "CodedAdamW")],
)
def test_training_has_the_same_bits(rank, size, name):
    """Gloo sends payloads that the core has made; pycomm's backend does all in the core."""
    given = [gradients(rank, step) for step in range(6)]
    models = [Chosen(unit=1.0) for _ in range(2)]
    plain = train(METHODS[name], models[0], given)
    with defaults():
        other = train(METHODS[name], models[1], given)
    assert equal(plain, other)


# ----------------------------------------------------------------------------- nothing is unpickled
# No training reads a pickle of another rank: reading one runs code that its sender chooses.


_read: list[str] = []
_watching = False


def _audit(event: str, args: tuple[object, ...]) -> None:
    if _watching and event == "pickle.find_class":
        _read.append(f"{args[0]}.{args[1]}")


@cache
def _install() -> None:
    sys.addaudithook(_audit)  # for the life of the process


def _watched(train: Callable[[], object]) -> list[str]:
    """Return the classes that pickles named while a training ran, and of one read on purpose."""
    global _watching
    _install()
    _read.clear()
    _watching = True
    # Texts and numbers in a pickle name no class, so torch's object collectives are watched, too.
    with mock.patch.object(distributed_c10d, "_tensor_to_object", _object_collective):
        try:
            train()
            pickle.loads(pickle.dumps(torch.Size))
        finally:
            _watching = False
    return list(_read)


def _object_collective(*args: object) -> None:
    raise AssertionError("a collective of torch that unpickles what other ranks send")


def _adopted() -> None:
    one, other = (trained(ways.momentum, 2) for _ in range(2))
    other.optimizer.adopt_state(one.optimizer)


def _first_step(taken: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, after a step where one is `taken`."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = ways.ADAMW(model.parameters())
    if taken:
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _handed_over() -> None:
    model, optimizer = _first_step(True)
    pycomm.elastic.hand_over(model, optimizer, has=dist.get_rank() == 0)


def _horovod() -> None:
    hvd.init()
    model, optimizer = _first_step(hvd.rank() == 0)
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)


TRAININGS: dict[str, Callable[[], object]] = {
    **{name: lambda way=way: trained(way, 2).end() for name, way in METHODS.items()},
    "adopted optimizer": _adopted,
    "hand-over": _handed_over,
    "Horovod's functions": _horovod,
}


@on_ranks(2)
@each_value
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_reads_no_pickle(rank, size, name):
    # The hook has seen the one that was read on purpose.
    assert _watched(TRAININGS[name]) == ["torch.Size"]
