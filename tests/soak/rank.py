"""Rank of the soak: a process that joins groups, trains, and lives through what happens.

A `Rank` is led through a pipe: each word is one of its methods, called on all ranks of a group at
once. What the method returns, or the text of what it raised, is the answer.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import faulthandler
import hashlib
import os
import random
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # the first optimizer does, and would take seconds while others wait for it
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.backend
from pycomm import elastic
from tests.faults.injection.case import OPS, Call
from tests.faults.injection.groups import TorchGroup
from tests.soak.held import connections, held_at_rest
from tests.soak.schedule import Event, GroupSetup

INPUTS, CLASSES = 64, 10
TIMEOUT = timedelta(seconds=60)
WAITS = 60.0
"""Seconds of training in which a death or an abort must have been told."""


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, 256),
        nn.LayerNorm(256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


def cut_connections(rng: random.Random, spared_port: int) -> None:
    """Reset some of this process's TCP connections, as `ss -K` does; not those with a store."""
    libc = ctypes.CDLL(None)
    nowhere = (ctypes.c_uint16 * 8)(socket.AF_UNSPEC)  # to connect there is to reset
    for _, twin in connections():
        with contextlib.suppress(OSError):
            if twin.getpeername()[1] != spared_port and rng.random() < 0.5:
                libc.connect(twin.fileno(), nowhere, ctypes.sizeof(nowhere))


def our_backend() -> Any:
    """Return the backend of the default group."""
    found = pycomm.backend.find()
    assert found is not None
    return found


def all_collectives(group: dist.ProcessGroup | None, numel: int) -> None:
    """Call each, and check what it yields."""
    calls = TorchGroup(group or dist.group.WORLD)
    for op in OPS:
        assert calls.call(Call(op, numel, root=calls.ranks - 1), False), op


class Rank:
    """One process. The methods without underscore are what the director may say."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.port = 0  # of the store
        self.model: DistributedDataParallel | nn.Module
        self.optimizer: torch.optim.Optimizer
        self.state: Any = None
        self.codec = "none"
        self.batches = torch.Generator()
        self.centres = torch.empty(0)

    # ------------------------------------------------------------------ groups

    def join(self, setup: GroupSetup, address: str) -> str:
        """Meet the other processes. `address` is a file, or the port of a TCPStore."""
        store: dist.Store
        ranks = len(setup.order)
        if address.isdigit():
            self.port = int(address)
            store = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=TIMEOUT)
        else:
            self.port = 0
            store = dist.FileStore(address, ranks)
        dist.init_process_group(
            "pycomm",
            store=store,
            rank=setup.order.index(self.process),
            world_size=ranks,
            timeout=TIMEOUT,
            pg_options=pycomm.Options(transport=setup.transport, sockets=setup.sockets),
        )
        return our_backend().describe()

    def found(self, setup: GroupSetup) -> str:
        """Make an elastic group, which has no members yet; return the handle of this process."""
        options = pycomm.Options(
            transport=setup.transport, sockets=setup.sockets, enable_reconfigure=True
        )
        store = dist.HashStore()
        dist.init_process_group(
            "pycomm", store=store, rank=0, world_size=1, timeout=TIMEOUT, pg_options=options
        )
        return elastic.handle()

    def form(self, uuid: int, handles: list[str]) -> str:
        """Form the elastic group of these processes."""
        elastic.reconfigure(uuid, handles)
        return our_backend().describe()

    def leave(self) -> None:
        """Keep the model, and nothing of the group."""
        self._unwrap()
        dist.destroy_process_group()

    def rest(self) -> dict[str, int]:
        """Let everything go that belongs to a cycle; tell what is left."""
        self.model, self.optimizer = nn.Identity(), torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.state = None
        return held_at_rest()

    # ------------------------------------------------------------------ training

    def begin(self, seed: int) -> None:
        """A new model, and new data for it."""
        torch.manual_seed(seed)
        self.centres = torch.randn(CLASSES, INPUTS)
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.5)
        for parameter in self.model.parameters():  # so that it can be sent before the first step
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.batches.manual_seed(seed + self.process)

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

    def train(self, steps: int) -> dict[str, Any]:
        """Train; return the mean loss, and what the parameters are, to the bit."""
        losses = [self._step() for _ in range(steps)]
        return {
            "steps": steps,
            "loss": sum(losses) / steps,
            "parameters": self._digest(list(self.model.parameters())),
        }

    @staticmethod
    def _digest(tensors: list[torch.Tensor]) -> str:
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().numpy().tobytes())
        return digest.hexdigest()[:16]

    def hand_over(self, event: Event) -> str:
        """The process that has joined gets model and optimizer; return what they are."""
        new = self.process == event.process
        if new:
            self.begin(event.seed)
            self.state = None
        self._unwrap()
        elastic.hand_over(self.model, self.optimizer, has=not new, chunk_bytes=1 << 16)
        parameters = list(self.model.parameters())
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in parameters]
        return self._digest([*parameters, *momenta])

    def _train_until(self, error: type[Exception]) -> Exception:
        end = time.monotonic() + WAITS
        while time.monotonic() < end:
            try:
                self._step()
            except error as caught:
                return caught.with_traceback(None)  # its frames hold the model
        raise AssertionError(f"no {error.__name__} in {WAITS} s")

    def save(self, folder: str) -> None:
        """Save what all ranks need who go on from here."""
        saved = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "codec": self.codec,
            "state": self.state.state_dict() if self.state else None,
        }
        torch.save(saved, f"{folder}/{dist.get_rank()}")

    def load(self, folder: str, ranks: int) -> None:
        """Go on from what so many ranks have saved."""
        saved = [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)]
        self.state = None
        self.wrap(saved[0]["codec"])
        self.model.module.load_state_dict(saved[0]["model"])
        self.optimizer.load_state_dict(saved[0]["optimizer"])
        if self.state is not None:
            self.state.load_state_dict(*(one["state"] for one in saved))

    # ------------------------------------------------------------------ what happens

    def slow(self, event: Event) -> None:
        """One rank comes late."""
        if self.process == event.process:
            time.sleep(event.seconds)

    def groups(self, event: Event) -> None:
        """Groups of some of the ranks, made, used and destroyed."""
        rng = random.Random(event.seed)
        for _ in range(2):
            members = sorted(rng.sample(range(dist.get_world_size()), 2))
            numel = rng.randrange(1, 30_000)
            group = dist.new_group(members, timeout=TIMEOUT)
            if dist.get_rank() in members:
                all_collectives(group, numel)
                dist.destroy_process_group(group)
        all_collectives(None, 1000)

    def split(self, event: Event) -> None:
        """A group that is split from the world, by torch's words and by ours."""
        rng = random.Random(event.seed)
        world = dist.group.WORLD
        assert world is not None
        ranks = sorted(rng.sample(range(world.size()), 2))
        if world.rank() in ranks:
            options = copy.deepcopy(our_backend().options)
            options.group_name = f"part {event.seed}"
            half = world.split_group(ranks, opts=options, group_name=options.group_name)
            x = torch.full((rng.randrange(1, 30_000),), 1.0)
            half.allreduce([x]).wait()
            assert (x == 2).all(), "all_reduce of a part"
            half.shutdown()

    def mismatch(self, event: Event) -> None:
        """Ranks of a group call different things; all are told, and the world goes on."""
        group = dist.new_group(timeout=TIMEOUT)
        numel = 1000 + event.seed % 1000
        x = torch.ones(numel + (self.process == event.process))
        text = "sizes differ, and nobody has said so"
        try:
            dist.all_reduce(x, group=group)
        except pycomm.WireMismatch as error:
            text = str(error)
        assert str(numel + 1) in text, text
        dist.destroy_process_group(group)

    def cut(self, event: Event) -> dict[str, Any]:
        """Connections are reset again and again, while the ranks train."""
        with self._at_random(event, lambda rng: cut_connections(rng, self.port)):
            return self.train(event.steps)

    @contextlib.contextmanager
    def _at_random(self, event: Event, act: Callable[[random.Random], None]) -> Iterator[None]:
        """Within it, the process of the event acts three times, from another thread."""
        over = threading.Event()

        def run() -> None:
            rng = random.Random(event.seed)
            for _ in range(3):
                if over.wait(rng.uniform(0, event.seconds)):
                    return
                act(rng)

        thread = threading.Thread(target=run)
        if self.process == event.process:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()

    def abort(self, event: Event) -> None:
        """A rank gives up, from another thread; all are told."""
        timer = threading.Timer(event.seconds, lambda: dist.group.WORLD.abort())
        if self.process == event.process:
            timer.start()
        error = self._train_until(pycomm.Error)
        if timer.ident is not None:
            timer.join()
        assert "abort" in str(error), str(error)
        self.leave()

    def kill(self, event: Event) -> dict[str, Any]:
        """A rank is killed at any point of its training; the others shrink the group and go on."""
        error = self._lose(event)
        dist.shrink_group(error.ranks, shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
        self.wrap(self.codec)
        return {"lost": error.rank}

    def die(self, event: Event) -> None:
        """A member of an elastic group is killed at any point of its training."""
        self._lose(event)
        self._unwrap()

    def _lose(self, event: Event) -> pycomm.PeerLost:
        if self.process == event.process:
            threading.Timer(event.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        error = self._train_until(pycomm.PeerLost)
        assert isinstance(error, pycomm.PeerLost)
        return error


def serve(process: int, link: Connection, log: str) -> None:
    """The life of a process: do what is said, until nobody is there to say it."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    rank = Rank(process)
    while True:
        try:
            word, args = link.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, getattr(rank, word)(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        link.send(answer)
