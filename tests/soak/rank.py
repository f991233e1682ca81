"""Rank of the soak: a process that trains in case after case, and lives through their faults."""

from __future__ import annotations

import copy
import hashlib
import random
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # the first optimizer does, and would take seconds while others wait for it
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import backend, elastic
from pycomm.elastic import transfer
from tests.faults.injection.case import LASTS, OPS, Call, Case
from tests.faults.injection.elastic import found
from tests.faults.injection.groups import TorchGroup
from tests.faults.injection.rank import Rank
from tests.soak.held import held_at_rest, use_one_arena

INPUTS, CLASSES = 64, 10
TIMEOUT = timedelta(seconds=60)
WAITS = 60.0
"""Seconds of training in which a death or an abort must have been told."""
AFTER = 0.2
"""Seconds of training after a fault that all survive."""


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, 256),
        nn.LayerNorm(256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


class Trainer(Rank):
    """One process. Its number is its rank in groups of all."""

    # Whom nobody reaches is told when the others leave, and here they keep the group until then.
    cut_for_ever = False

    model: DistributedDataParallel | nn.Module
    optimizer: torch.optim.Optimizer
    state: Any = None
    codec = "none"
    centres: torch.Tensor
    seed: int

    def __init__(self, process: int, folder: str, say: Any) -> None:
        use_one_arena()
        torch.set_num_threads(1)
        self.rank, self.folder, self.say = process, folder, say
        self.batches = torch.Generator()

    def begin(self, case: Case) -> None:
        super().__init__(case, self.rank, self.folder, self.say)
        self.options = {"transport": case.transport, "sockets": 1 + int(2 * case.how)}
        self.lost: list[int] = []

    # ------------------------------------------------------------------ groups

    def meet(self, name: str = "first") -> None:
        """Make the default group of all."""
        dist.init_process_group(
            "pycomm",
            store=dist.FileStore(f"{self.folder}/{name}{self.case.number}", self.case.ranks),
            rank=self.rank,
            world_size=self.case.ranks,
            timeout=TIMEOUT,
            pg_options=pycomm.Options(**self.options),
        )
        self._look()

    def found(self) -> str:
        """Make an elastic group; return the handle of this process."""
        return found(TIMEOUT, **self.options)

    def form(self, uuid: int, handles: list[str]) -> None:
        """Form the elastic group of these processes."""
        elastic.reconfigure(uuid, handles)
        self._look()

    def _look(self) -> None:
        described = backend.find().describe()
        assert self.case.transport in described, described
        self.group = TorchGroup(dist.group.WORLD)

    def regroup(self) -> None:
        """Make, use and end groups of some ranks, by both functions of torch, and a wrong call."""
        rng = random.Random(self.case.number)
        ranks, numel = sorted(rng.sample(range(dist.get_world_size()), 2)), rng.randrange(1, 30_000)
        group = dist.new_group(ranks, timeout=TIMEOUT)
        if dist.get_rank() in ranks:
            calls = TorchGroup(group)
            for op in OPS:
                assert calls.call(Call(op, numel, root=1), False), op
            dist.destroy_process_group(group)
            options = copy.deepcopy(backend.find().options)
            options.group_name = f"part of {self.case.number}"
            half = dist.group.WORLD.split_group(ranks, opts=options, group_name=options.group_name)
            x = torch.full((numel,), 1.0)
            half.allreduce([x]).wait()
            assert (x == 2).all(), "all_reduce of a part"
            half.shutdown()
        group, text = dist.new_group(timeout=TIMEOUT), "sizes differ, and nobody has said so"
        try:
            dist.all_reduce(torch.ones(numel + (self.rank == self.case.victim)), group=group)
        except pycomm.WireMismatch as error:
            text = str(error)
        assert str(numel + 1) in text, text
        dist.destroy_process_group(group)

    def leave(self) -> None:
        """Keep the model, and nothing of the group."""
        self._unwrap()
        self.group = None
        dist.destroy_process_group()

    def rest(self) -> dict[str, int]:
        """Let everything go that belongs to a case; tell what is left."""
        self.model, self.optimizer = nn.Identity(), torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.state = None
        return held_at_rest()

    # ------------------------------------------------------------------ training

    def make(self, seed: int | None = None) -> None:
        """A new model, and data for it: by the case's seed, or by that of an earlier one."""
        self.seed = self.case.seed if seed is None else seed
        torch.manual_seed(self.seed)
        self.centres = torch.randn(CLASSES, INPUTS)
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.5)
        for parameter in self.model.parameters():  # so that it can be sent before the first step
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.batches.manual_seed(self.seed + self.rank)

    def _unwrap(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.model.module  # the wrapper goes: its reducer listens to parameters

    def wrap(self, codec: str, joins: bool = False) -> None:
        """Go on with this codec. All get the parameters and momenta of the first rank; with the
        same codec, what is owed stays owed. If one joins, it owes nothing."""
        self._unwrap()
        self.model = DistributedDataParallel(self.model, bucket_cap_mb=0.05)
        for entry in self.optimizer.state.values():
            dist.broadcast(entry["momentum_buffer"], 0)
        before = self.state if codec == self.codec else None
        self.state, self.codec = None, codec
        if codec != "none":
            self.state = pycomm.compress(self.model, codec)
            if before is not None or joins:
                self.state.adopt_state(before)

    def _step(self) -> float:
        labels = torch.randint(CLASSES, (32,), generator=self.batches)
        points = self.centres[labels] + 2 * torch.randn(32, INPUTS, generator=self.batches)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(points), labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def train(self, steps: int) -> tuple[float, str]:
        """Train; return the mean loss, and what the parameters are, to the bit."""
        losses = []
        for _ in range(steps):
            if time.monotonic() >= self.due:
                self.due = float("inf")
                self.fail()
            losses.append(self._step())
        return sum(losses) / steps, self._digest(list(self.model.parameters()))

    @staticmethod
    def _digest(tensors: list[torch.Tensor]) -> str:
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().numpy().tobytes())
        return digest.hexdigest()[:16]

    def hand_over(self) -> str:
        """The victim, which has joined, gets model and optimizer; return what they are."""
        new = self.rank == self.case.victim
        if new:
            self.make()
            self.state = None
        self._unwrap()
        with patch.object(transfer, "_CHUNK", 1 << 16):  # so that a rank may die between chunks
            elastic.hand_over(self.model, self.optimizer, has=not new)
        parameters = list(self.model.parameters())
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in parameters]
        return self._digest([*parameters, *momenta])

    def save(self, folder: str) -> None:
        """Save what all ranks need who go on from here."""
        saved = {
            "seed": self.seed,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "codec": self.codec,
            "state": self.state.state_dict() if self.state else None,
        }
        torch.save(saved, f"{folder}/{dist.get_rank()}")

    def load(self, folder: str, ranks: int) -> None:
        """Go on from what so many ranks have saved."""
        saved = [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)]
        self.make(saved[0]["seed"])
        self.state = None
        self.wrap(saved[0]["codec"])
        self.model.module.load_state_dict(saved[0]["model"])
        self.optimizer.load_state_dict(saved[0]["optimizer"])
        if self.state is not None:
            self.state.load_state_dict(*(one["state"] for one in saved))

    # ------------------------------------------------------------------ what happens

    def operate(self, _: Any = None) -> None:
        """Train through the fault: to the end, or until it is told."""
        facts: dict[str, Any] = {}
        self.arm()
        try:
            over = self.started + (self.case.delay + AFTER if self.case.fault in LASTS else WAITS)
            while not self.all_at(over):
                self.train(1)
        except pycomm.Error as error:
            facts, self.lost = self.tell(error), list(getattr(error, "ranks", ()))
        self.say("over", {"at": time.monotonic(), **facts})

    @staticmethod
    def all_at(moment: float) -> bool:
        """Return whether all ranks are past a moment of this machine's clock."""
        past = torch.tensor(float(time.monotonic() > moment))
        dist.all_reduce(past, dist.ReduceOp.MIN)
        return bool(past)

    def regain(self) -> None:
        """Make a group that works of one that has failed: of those that are left, or anew."""
        if self.lost:
            dist.shrink_group(self.lost, shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
        elif self.case.fault == "abort":
            self.leave()
            self.meet("again")
