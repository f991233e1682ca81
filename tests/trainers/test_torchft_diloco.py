"""DiLoCo under torchft with a codec: steps that fail, replicas that heal, members that change."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from tests.torch.harness import all_equal

pytest.importorskip("torchft")

from torchft import diloco_regression_test
from torchft._test import diloco_trainer

from pycomm.torchft import DiLoCo, HandOverTransport, ProcessGroupPycomm
from tests.torch.pool import Pool, on_ranks
from tests.trainers.test_torchft_compressed import Manager

LIMIT = timedelta(seconds=20)
EVERY = 4  # local steps between two averages of a fragment: with two fragments one every 2


class Led(Manager):
    """The stand-in for a Manager with the calls that DiLoCo makes; the test sets the votes."""

    _use_async_quorum = False

    def __init__(self, rank: int, store: Any) -> None:
        super().__init__(rank, store)
        self.functions: dict[str, Any] = {}
        self.commits = True

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        assert key not in self.functions
        self.functions[key] = load, save

    def start_quorum(self) -> None:
        self.error = None

    def should_commit(self) -> bool:
        committed = self.commits and self.error is None
        self.step += committed
        return committed

    def allow_state_dict_read(self) -> None: ...

    def disallow_state_dict_read(self) -> None: ...


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 40))


class Trainer:
    """A replica with two fragments, which goes on by outer steps."""

    def __init__(self, manager: Led, codec: str, **options: Any) -> None:
        self.manager, self.net = manager, network()
        self.inner = torch.optim.SGD(self.net.parameters(), lr=0.05)
        outer = [torch.optim.SGD(one.parameters(), lr=0.7, momentum=0.9) for one in self.net]
        self.outer = outer
        self.diloco = DiLoCo(
            manager, list(self.net), self.inner, outer, EVERY, codec=codec, **options
        )
        self.taken = 0

    def outer_step(self, rank: int) -> None:
        with self.diloco:
            for _ in range(EVERY // 2):
                random = torch.Generator().manual_seed(100 * self.taken + rank)
                self.taken += 1
                self.inner.zero_grad()
                self.net(torch.randn(8, 60, generator=random)).square().mean().backward()
                self.inner.step()

    def owes(self) -> dict[str, Any]:
        found = {}
        for number, state in enumerate(self.diloco.states):
            state.settle()
            for name, saved in (state.residuals.state_dict() if state.residuals else {}).items():
                found[f"{number} {name}"] = {
                    role: saved[role].clone() for role in ("worker", "owner") if role in saved
                }
        return found

    def everything(self) -> torch.Tensor:
        kept = [value for f in self.diloco._fragments for value in f.original_parameters.values()]
        momenta = [s["momentum_buffer"] for o in self.outer for s in o.state.values()]
        return torch.cat([value.detach().reshape(-1) for value in [*kept, *momenta]])


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.stop()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name][role], b[name][role]) for name in a for role in a[name]
    )


def nonzero(owed: dict[str, Any]) -> bool:
    return any(bool(saved["worker"].any()) for saved in owed.values())


# ------------------------------------------------------------------ what was not committed


def thrown(rank: int, size: int, store: Any, codec: str, fails: bool) -> tuple[Any, Any]:
    """Return parameters, momenta and residuals after four steps; a fifth is not committed."""
    manager = Led(rank, store)
    trainer = Trainer(manager, codec)
    manager.configure("first", list(range(size)))
    for _ in range(3):
        trainer.outer_step(rank)
        assert manager.error is None
    if fails:
        before, params = trainer.owes(), trainer.everything()
        manager.commits = False
        trainer.outer_step(rank + 50)
        manager.commits = True
        assert manager.step == 3
        trainer.taken = 3 * EVERY // 2
        assert torch.equal(trainer.everything(), params)
        fragment = trainer.diloco._fragments[3 % 2]
        for name, value in fragment._model_fragment.named_parameters():
            assert torch.equal(value, fragment.original_parameters[name]), name
        for state in trainer.diloco.states:  # as the next step does it
            state.discard() if state._at == manager.step else None
        assert same(trainer.owes(), before)
        # Of the other fragment the local steps are part of its next movement, as torchft has it.
        with torch.no_grad():
            other = trainer.diloco._fragments[0]
            for name, value in other._model_fragment.named_parameters():
                value.copy_(other.original_parameters[name])
    else:
        for fragment in trainer.diloco._fragments:
            fragment.restore_parameters()
    for _ in range(2):
        trainer.outer_step(rank)
        assert manager.error is None
    assert manager.step == 5
    assert nonzero(trainer.owes())
    return trainer.everything(), trainer.owes()


@pytest.mark.parametrize("codec", ["int4", "topk:0.1", "powersgd:2"])
def test_an_uncommitted_outer_step_leaves_no_trace(pool, codec):
    with_it = pool.run(thrown, codec, True, ranks=2, backend=None)
    without = pool.run(thrown, codec, False, ranks=2, backend=None)
    for (values, owed), (wanted, wants) in zip(with_it, without, strict=True):
        assert torch.equal(values, wanted)
        assert same(owed, wants)
    assert torch.equal(with_it[0][0], with_it[1][0])


# ------------------------------------------------------------------ who heals, and who counts


@on_ranks(3, backend=None, then=all_equal)
def test_a_healing_replica_owes_nothing(rank, size, store):
    """The third replica comes with the others' parameters, and the others keep what they owe."""
    manager = Led(rank, store)
    trainer = Trainer(manager, "int4")
    manager.configure("first", [0, 1] if rank < 2 else [2])
    for _ in range(2):
        trainer.outer_step(rank)
    owed = trainer.owes()
    assert nonzero(owed) == (rank < 2)  # a replica alone sends nothing
    manager.configure("second", [0, 1, 2])
    # Synchronously, as in torchft: before the step the new one has loaded what the first one has.
    transport: HandOverTransport[Any] = HandOverTransport(manager._pg)
    if rank == 0:
        state = {key: save() for key, (_, save) in manager.functions.items()}
        transport.send_checkpoint([2], 2, state, LIMIT)
    if rank == 2:
        state = transport.recv_checkpoint(0, transport.metadata(), 2, LIMIT)
        for key, (load, _) in manager.functions.items():
            load(state[key])
        for fragment in trainer.diloco._fragments:
            fragment.restore_parameters()
    transport.disallow_checkpoint()
    trainer.outer_step(rank)
    assert manager.error is None
    after = {name: saved for name, saved in trainer.owes().items() if name.startswith("1")}
    if rank < 2:
        assert same(after, {name: owed[name] for name in after}), "the other fragment's are kept"
    trainer.outer_step(rank)
    assert manager.error is None
    assert nonzero(trainer.owes())
    return trainer.everything()


@on_ranks(3, backend=None, then=all_equal)
def test_the_average_is_over_the_participants(rank, size, store):
    """Exactly: of three replicas two take part, and the third's movement is seen by nobody."""
    manager = Led(rank, store)
    trainer = Trainer(manager, "fp32")
    manager.configure("first", list(range(size)))
    manager.participants, manager.takes_part = 2, rank < 2
    start = trainer.net[0].weight.detach().clone()
    with trainer.diloco:
        for _ in range(EVERY // 2):
            trainer.inner.zero_grad()
            for parameter in trainer.net.parameters():
                parameter.grad = torch.full_like(parameter, 4.0 ** (rank + 1))
            trainer.inner.step()
    assert manager.error is None
    moved = [EVERY // 2 * 0.05 * 4.0 ** (r + 1) for r in range(2)]
    wanted = 0.7 * sum(moved) / 2
    assert torch.allclose(start - trainer.net[0].weight, torch.tensor(wanted), rtol=1e-5)
    return trainer.everything()


@on_ranks(1, backend=None)
def test_arguments_that_the_codec_replaces_are_refused(rank, size, store):
    manager = Led(rank, store)
    for name in ("should_quantize", "use_bucketization"):
        with pytest.raises(ValueError, match=f"{name}: a fragment is one bucket"):
            Trainer(manager, "int4", **{name: True})


# ------------------------------------------------------------------ torchft's own numbers

REGRESSIONS = [
    *(f"test_diloco_mocked_updates_{number}" for number in range(6)),
    "test_diloco_mocked_failure_recovery_0",
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_exact_outer_steps_are_torchfts(monkeypatch, name):
    """Its regression test (BSD licence), on Gloo with its DiLoCo, and on pycomm with ours."""
    histories: list[Any] = []

    class Kept(diloco_regression_test.DiLoCoMockedUpdateTest):
        def _check_against_fixture(self, results: Any) -> bool:
            histories.append(results)
            return True

    def run() -> None:
        getattr(Kept(name), name)()

    run()
    monkeypatch.setattr(diloco_trainer, "ProcessGroupGloo", ProcessGroupPycomm)
    exact = partial(DiLoCo, codec="fp32")
    monkeypatch.setattr(diloco_regression_test, "DiLoCo", exact)
    run()
    theirs, ours = histories
    for their, our in zip(theirs, ours, strict=True):
        assert their[0]["history"] == our[0]["history"]
