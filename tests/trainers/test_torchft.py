"""Compressed replicas under torchft's lighthouse: killed, replaced, and equal to the bit.

The example is run as users run it, in processes of this machine. At the end are torchft's own
suites, which come with it (BSD licence), on pycomm's group in Gloo's place.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import Error
from tests.torch import interpreter
from tests.torch.harness import batch, network
from tests.torch.pool import on_ranks

pytest.importorskip("torchft")

from torchft import local_sgd_integ_test, manager_integ_test, process_group_test
from torchft._test import diloco_trainer

from pycomm.torchft import DistributedDataParallel, ProcessGroupPycomm
from pycomm.torchft import group as torchft_group
from tests.trainers.kills import Lab, kill_and_replace


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.end()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("codec", "transport"), [("int4", "auto"), ("topk:0.05", "tcp")])
def test_replicas_killed_at_random_end_equal(lab: Lab, codec: str, transport: str) -> None:
    """Any replica but the first, at any moment of a step; `make soak` has two hundred kills."""
    outcome = kill_and_replace(lab, 2, 4, "--codec", codec, "--transport", transport)
    assert len(outcome.waits) == 2


UNDER_RUN = """
import torch, torchft.ddp
from pycomm.run import apply
apply(["--codec", "int4"])
model = torchft.ddp.DistributedDataParallel(None, torch.nn.Linear(64, 64))
print([hook.__name__ for hook, _ in model._comm_hooks])
"""


def test_under_run_torchfts_own_hook_stays() -> None:
    """It alone averages over the replicas: the model's process group has one rank."""
    done = interpreter.run("-c", UNDER_RUN)
    assert done.stdout == "['_comm_hook']\n", done.stderr
    assert "Use pycomm.torchft.DistributedDataParallel" in done.stderr


# ------------------------------------------------------------------------------------------ quorums
# A quorum may name a replica that is gone: nobody waits for it until the timeout. Replicas are
# threads of this process, as in torchft's own tests. The timeout is a minute.


LIMIT = timedelta(seconds=60)


class Replicas:
    """Three replicas, and the store of their quorums."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.groups = [ProcessGroupPycomm(LIMIT) for _ in range(3)]
        self._threads = ThreadPoolExecutor(3)

    def configure(self, quorum: int, ranks: list[int], size: int, delay: float = 0.0) -> list[str]:
        """Let these replicas take part in a quorum, the last one later; return how they fared."""
        address = f"localhost:{self.store.port}/torchft/{quorum}/0"

        def take_part(rank: int) -> str:
            time.sleep(delay * (rank == ranks[-1]))
            try:
                self.groups[rank].configure(address, f"replica_{rank}", rank, size, quorum)
            except Error as error:
                return f"{type(error).__name__}: {error}"
            ones = torch.ones(3)
            self.groups[rank].allreduce([ones], dist.AllreduceOptions()).wait()
            assert ones.tolist() == [size] * 3
            return "formed"

        return list(self._threads.map(take_part, ranks))

    def end(self) -> None:
        for group in self.groups:
            group.shutdown()


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    made = Replicas()
    yield made
    made.end()


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_dead_former_member_is_told_early(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    monkeypatch.setattr(torchft_group, "UNKNOWN_MEMBER_TIMEOUT", 60.0)
    assert replicas.configure(1, [0, 1, 2], 3) == ["formed"] * 3
    replicas.groups[gone].shutdown()  # its port refuses from now on
    rest = [rank for rank in range(3) if rank != gone]
    outcomes = replicas.configure(2, rest, 3)
    assert any(o.startswith("PeerLost") and f"replica {gone} of 3" in o for o in outcomes)
    assert "formed" not in outcomes
    replicas.groups = [replicas.groups[rank] for rank in rest]
    assert replicas.configure(3, [0, 1], 2) == ["formed"] * 2


def test_a_replacement_is_awaited(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_group, "UNKNOWN_MEMBER_TIMEOUT", 60.0)
    assert replicas.configure(1, [0, 1, 2], 3) == ["formed"] * 3
    replicas.groups[2].shutdown()
    replicas.groups[2] = ProcessGroupPycomm(LIMIT)
    assert "formed" not in replicas.configure(2, [0, 1, 2], 3, delay=1.5)  # later than allowed
    assert replicas.configure(3, [0, 1, 2], 3, delay=1.5) == ["formed"] * 3


def test_a_late_former_member_is_awaited(replicas: Replicas) -> None:
    assert replicas.configure(1, [0, 1, 2], 3) == ["formed"] * 3
    replicas.groups[2].shutdown()
    replicas.groups[2] = ProcessGroupPycomm(LIMIT)
    assert replicas.configure(2, [0, 2, 1], 3, delay=1.5) == ["formed"] * 3


def test_an_unknown_member_is_awaited_longer(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchft_group, "UNKNOWN_MEMBER_TIMEOUT", 0.5)
    assert replicas.configure(1, [0, 1], 2) == ["formed"] * 2
    outcomes = replicas.configure(2, [0, 1], 3)
    assert any(o.startswith("Timeout") and "replica 2 of 3" in o for o in outcomes)
    assert "formed" not in outcomes
    late = replicas.configure(3, [0, 1, 2], 3, delay=3.0)  # too late for 1 s
    assert "formed" not in late
    assert "another replica has given up" in late[2]
    assert replicas.configure(4, [0, 1, 2], 3, delay=1.2) == ["formed"] * 3  # in time for 2 s


def test_a_store_whose_process_is_gone_is_told(replicas: Replicas) -> None:
    assert replicas.configure(1, [0, 1, 2], 3) == ["formed"] * 3
    port = replicas.store.port
    replicas.store = None
    other = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert other.port != port
    replicas.store = type("Gone", (), {"port": port})
    assert all("nobody listens" in outcome for outcome in replicas.configure(2, [1, 2], 3))
    replicas.store = other
    assert replicas.configure(3, [0, 1, 2], 3) == ["formed"] * 3


def test_all_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one publishes at the moment at which the others lose patience, again and again."""
    monkeypatch.setattr(torchft_group, "UNKNOWN_MEMBER_TIMEOUT", 0.05)
    monkeypatch.setattr(torchft_group, "_LOOK", 0.0)
    monkeypatch.setattr(torchft_group, "_SUCCESSOR", 0.0)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    outcomes: list[set[str]] = []
    for turn in range(30):
        address, begin = f"localhost:{store.port}/{turn}", threading.Barrier(3)

        def meet(rank: int, address: str = address, begin: threading.Barrier = begin) -> str:
            one = torchft_group.QuorumRendezvous(f"handle {rank}", lambda _: False)
            one.formed([f"handle {rank}"])
            begin.wait()
            time.sleep(0.05 * (rank == 2))
            try:
                handles = one.handles(address, rank, 3, LIMIT)
            except Error:
                return "gave up"
            assert handles == ["handle 0", "handle 1", "handle 2"]
            return "goes"

        with ThreadPoolExecutor(3) as threads:
            outcomes.append(set(threads.map(meet, range(3))))
    assert all(len(outcome) == 1 for outcome in outcomes)


# ---------------------------------------------------------------------- a Manager that a test leads
# The Manager here is a stand-in: it says what the test tells it about quorum, healing and votes, as
# torchft's would after a talk with its lighthouse. Process groups, models and collectives are real.


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


def equal_and_finite(ends: list[Any]) -> None:
    for one in zip(*ends, strict=True):
        assert all(torch.equal(one[0], other) for other in one)
        assert one[0].isfinite().all()


@on_ranks(3, then=equal_and_finite, backend=None)
def test_a_replica_that_heals_sends_zeros_and_owes_nothing(rank, size, store):
    """The third replica heals in a step, with gradients that nobody must see."""
    manager = Manager(rank, store)
    model = DistributedDataParallel(manager, network(), codec="int4", bucket_cap_mb=0.02)
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
        assert model.state.residual_norms()
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


def test_no_step_leaves_a_work_of_ddps_own_group_behind():
    manager = Manager(0, dist.HashStore())
    model = DistributedDataParallel(manager, network(), codec="int4")
    manager.configure("first", [0])
    for manager.step in range(3):
        backward(model, 0, manager.step)
        assert manager.error is None
    works = [one for one in gc.get_objects() if type(one).__name__ == "_DummyWork"]
    assert len(works) <= 1  # that of the last step


def both_alike(results: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    assert all(torch.equal(*ends) for ends in results)


@on_ranks(2, then=both_alike, backend=None)
@pytest.mark.parametrize(
    ("codec", "feedback", "how"),
    [
        ("int4", "residual", "vote"),
        (STOCHASTIC, "decay:0.8,storage=int8", "quorum"),
        ("topk:0.05", "residual", "error"),
        ("int4", "residual", "quorum"),
    ],
)
def test_a_step_that_is_not_committed_leaves_no_trace(rank, size, store, codec, feedback, how):
    """Train twice, once with steps that are not committed; return both ends."""
    ends = []
    for failing in (False, True):
        manager = Manager(rank, store)
        options = {"codec": codec, "feedback": feedback, "bucket_cap_mb": 0.02}
        model = DistributedDataParallel(manager, network(), **options)
        manager.configure(f"first {failing}", [0, 1])
        for step in range(6):
            manager.step = step
            if failing and step in (2, 3):
                handle = None
                if how == "error" and rank == 1:  # in the middle of its backward
                    handle = model.module[3].weight.register_hook(partial(fail, manager))
                backward(model, rank, 100 + step)  # the same step, with other data
                assert how != "error" or manager.error is not None
                if handle is not None:
                    handle.remove()
                if how != "vote":
                    manager.configure(f"again {step}", [0, 1])
            backward(model, rank, step)
            assert manager.error is None
            move(model)
        assert model.state.step == 6
        ends.append(everything(model))
    return tuple(ends)


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


# ----------------------------------------------------------------------------- torchft's own suites
# Those of its Manager and of its LocalSGD and DiLoCo talk to its real lighthouse. The Manager's run
# a second time with gradients that travel in four bits.

LONG = pytest.mark.timeout(300)
INT4 = pycomm.Policy("int4", rules=(pycomm.Rule(codec="int4"),))  # however small they are


@pytest.fixture(autouse=True)
def _suites_on_pycomm(monkeypatch: pytest.MonkeyPatch) -> None:
    suites = process_group_test, manager_integ_test, local_sgd_integ_test, diloco_trainer
    for module in suites:
        monkeypatch.setattr(module, "ProcessGroupGloo", ProcessGroupPycomm)


@LONG
class Groups(process_group_test.MultiPgBaseTest):
    """Every collective, and again after a member has left; those that Gloo's tests skip, too."""

    BACKEND = "gloo"
    WORLD_SIZE = 3

    @classmethod
    def _create_pg(cls, backend: str) -> ProcessGroupPycomm:
        return ProcessGroupPycomm(timeout=timedelta(seconds=10))

    def assertRaisesRegex(self, kind: Any, pattern: Any, *args: Any, **kwargs: Any) -> Any:
        """Take pycomm's words for a member that has left, too."""
        expect = super().assertRaisesRegex
        return expect(kind, f"{pattern}|left|closed|aborted", *args, **kwargs)

    @process_group_test.parameterized.expand(process_group_test._ALL_COLLECTIVES)
    def test_collective_with_resiliency(self, collective: str) -> None:
        self._run_with_resiliency(collective, device="cpu")


@LONG
class Group(process_group_test.ProcessGroupTest):
    """The interface of a group."""

    def assertRaisesRegex(self, kind: Any, pattern: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the words of torch's store, if that is what has no time to answer."""
        expect = super().assertRaisesRegex
        return expect(kind, f"{pattern}|timed out after 10ms", *args, **kwargs)


@LONG
class PlainManager(manager_integ_test.ManagerIntegTest):
    """The Manager: recovery, quorums, replicas of several ranks."""


@LONG
class CompressedManager(manager_integ_test.ManagerIntegTest):
    """The same with DDP that sends four bits."""

    @pytest.fixture(autouse=True)
    def _compressed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compressed = partial(DistributedDataParallel, codec=INT4)
        monkeypatch.setattr(manager_integ_test, "DistributedDataParallel", compressed)


@LONG
class LocalSGD(local_sgd_integ_test.LocalSGDIntegTest):
    """LocalSGD, DiLoCo and Streaming DiLoCo under the Manager."""
