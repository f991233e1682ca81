"""Compression under torchft's Manager, step by step, with a Manager that a test leads.

The Manager here is a stand-in: it says what the test tells it about quorum, healing and votes, as
torchft's would after a talk with its lighthouse; `test_torchft.py` has the real one. Process
groups, models and collectives are real.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft")

import pycomm
from pycomm.torchft import DistributedDataParallel, ProcessGroupPycomm
from tests.torch.harness import batch, network
from tests.torch.pool import Pool, on_ranks

STOCHASTIC = "quant:bits=4,block=64,rounding=stochastic"


class Manager:
    """What `pycomm.torchft` uses of a Manager; its attributes are set by the test."""

    def __init__(self, rank: int, store: Any) -> None:
        self._pg = ProcessGroupPycomm(timeout=timedelta(seconds=20))
        self._rank, self._store = rank, store
        self._healing = False
        self.step, self.participants, self.takes_part = 0, 0, True
        self.error: Exception | None = None
        self.load: Callable[[Any], None]
        self._server: Any = None

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        assert (key, save()) == ("pycomm", {})
        self.load = load

    def configure(self, prefix: str, members: list[int]) -> None:
        """Form the group of these processes, as a new quorum does."""
        if self._rank == members[0]:
            self._server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self._store.set(prefix, str(self._server.port))
        address = f"localhost:{self._store.get(prefix).decode()}/{prefix}"
        self._pg.configure(address, str(self._rank), members.index(self._rank), len(members))
        self.participants = len(members)

    def wait_quorum(self) -> None:
        self.error = None

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def is_participating(self) -> bool:
        return self.takes_part and not self._healing

    def num_participants(self) -> int:
        return self.participants

    def current_step(self) -> int:
        return self.step

    def wrap_future(self, future: Any, default: Any) -> Any:
        def value(done: Any) -> Any:
            try:
                return done.value()
            except Exception as error:
                self.report_error(error)
                return default

        return future.then(value)


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.stop()


def backward(model: Any, rank: int, step: int, *, bad: bool = False) -> None:
    x, y = batch(rank, step)
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    (loss * torch.nan if bad else loss).backward()


def fail(manager: Manager, _: torch.Tensor) -> None:
    manager.report_error(pycomm.Error("on purpose"))


def move(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def everything(model: Any) -> torch.Tensor:
    state = model.state
    state.settle()
    parts = [p.detach().view(-1) for p in model.parameters()]
    residuals = state.residuals.state_dict() if state.residuals else {}
    for saved in residuals.values():
        parts += [saved[role].float().view(-1) for role in ("worker", "owner")]
    return torch.cat(parts)


# ------------------------------------------------------------------ who heals


def heals(rank: int, size: int, store: Any, codec: str) -> list[torch.Tensor]:
    """The third replica heals in a step, with gradients that nobody must see."""
    manager = Manager(rank, store)
    model = DistributedDataParallel(manager, network(), codec=codec, bucket_cap_mb=0.02)
    manager.configure("first", [0, 1, 2])
    for manager.step in range(2):
        backward(model, rank, manager.step)
        assert manager.error is None
        move(model)
    manager.step, manager.participants, manager._healing = 2, 2, rank == 2
    manager.configure("second", [0, 1, 2])
    manager.participants = 2
    backward(model, rank, 2, bad=rank == 2)
    assert manager.error is None
    sent = [p.grad.clone() for p in model.parameters()]
    model.state.settle()
    if rank == 2:
        assert model.state.residuals.has_residual
        assert all(worker == 0 for worker, _ in model.state.residual_norms().values())
        manager.load({})
    else:
        assert any(worker > 0 for worker, _ in model.state.residual_norms().values())
    move(model)
    manager.step, manager.participants, manager._healing = 3, 3, False
    backward(model, rank, 3)
    assert manager.error is None
    move(model)
    assert any(worker > 0 for worker, _ in model.state.residual_norms().values())
    assert model.state.step == 4
    return [*sent, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("codec", ["int4", "powersgd:2"])
def test_a_replica_that_heals_sends_zeros_and_owes_nothing(pool, codec):
    ends = pool.run(heals, codec, ranks=3, backend=None)
    for one in zip(*ends, strict=True):
        assert all(torch.equal(one[0], other) for other in one)
        assert one[0].isfinite().all()


@on_ranks(3, backend=None)
@pytest.mark.parametrize("participants", [1, 2, 3])
def test_the_average_is_over_the_participants(rank, size, store, participants):
    """Exact gradients: the average is over the participants, whoever is in the group."""
    manager = Manager(rank, store)
    net = torch.nn.Linear(100, 3, bias=False)
    model = DistributedDataParallel(manager, net, codec="fp32")
    manager.configure("first", list(range(size)))
    manager.participants, manager.takes_part = participants, rank < participants
    model(torch.full((1, 100), float(rank + 1))).sum().backward()
    assert manager.error is None
    expected = sum(r + 1 for r in range(participants)) / participants
    # Weights of 3/2 and 3 are exact, and so is their sum; the division rounds once.
    assert net.weight.grad.eq(torch.tensor(expected)).all()


# ------------------------------------------------------------------ what is left behind


def test_no_step_leaves_a_work_of_ddps_own_group_behind():
    manager = Manager(0, dist.HashStore())
    model = DistributedDataParallel(manager, network(), codec="int4")
    manager.configure("first", [0])
    for manager.step in range(3):
        backward(model, 0, manager.step)
        assert manager.error is None
    works = [one for one in gc.get_objects() if type(one).__name__ == "_DummyWork"]
    assert len(works) <= 1  # that of the last step


# ------------------------------------------------------------------ what was not committed


def with_failures(
    rank: int, size: int, store: Any, codec: str, feedback: str, how: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train twice, once with steps that are not committed; return both ends."""
    ends = []
    for failing in (False, True):
        manager = Manager(rank, store)
        model = DistributedDataParallel(
            manager, network(), codec=codec, feedback=feedback, bucket_cap_mb=0.02
        )
        manager.configure(f"first {failing}", [0, 1])
        for step in range(6):
            manager.step = step
            if failing and step in (2, 3):
                other = 100 + step  # the same step, with other data
                if how == "vote":
                    backward(model, rank, other)
                elif how == "quorum":
                    backward(model, rank, other)
                    manager.configure(f"again {step}", [0, 1])
                else:  # a replica has an error in the middle of its backward
                    handle = None
                    if rank == 1:
                        handle = model.module[3].weight.register_hook(partial(fail, manager))
                    backward(model, rank, other)
                    assert manager.error is not None
                    if handle is not None:
                        handle.remove()
                    manager.configure(f"again {step}", [0, 1])
            backward(model, rank, step)
            assert manager.error is None
            move(model)
        assert model.state.step == 6
        ends.append(everything(model))
    return ends[0], ends[1]


@pytest.mark.parametrize(
    ("codec", "feedback", "how"),
    [
        ("int4", "residual", "vote"),
        (STOCHASTIC, "decay:0.8,storage=int8", "quorum"),
        ("topk:0.05", "residual", "error"),
        ("powersgd:2", "residual", "error"),
        ("int4", "residual", "quorum"),
    ],
)
def test_a_step_that_is_not_committed_leaves_no_trace(pool, codec, feedback, how):
    ends = pool.run(with_failures, codec, feedback, how, backend=None)
    for once, again in ends:
        assert torch.equal(once, again)


# ------------------------------------------------------------------ what does not fit


@on_ranks(3, backend=None)
def test_a_replica_with_another_codec_raises(rank, size, store):
    """A replica with another codec comes: it raises, and the others skip the step."""
    manager = Manager(rank, store)
    model = DistributedDataParallel(manager, network(), codec="int8" if rank == 2 else "int4")
    if rank < 2:
        manager.configure("first", [0, 1])
        backward(model, rank, 0)
        move(model)
        manager.step = 1
    manager.configure("second", [0, 1, 2])
    manager.participants, manager.step, manager._healing = 2, 1, rank == 2
    if rank == 2:
        with pytest.raises(pycomm.WireMismatch, match=r"do not compress alike.*bits=8"):
            backward(model, rank, 1)
        return
    backward(model, rank, 1)
    assert isinstance(manager.error, pycomm.WireMismatch)
    manager.configure("third", [0, 1])
    backward(model, rank, 1)
    assert manager.error is None
    assert model.state.step == 2


def test_another_process_group_is_refused():
    class Other:
        _pg = object()

    with pytest.raises(TypeError, match="the manager's process group"):
        DistributedDataParallel(Other(), network())
