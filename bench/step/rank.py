"""One rank of `python -m pycomm.bench step`: takes steps with one method after the other."""

# No `from __future__ import annotations` here: DDP checks a hook's annotations, as types.
import gc
import itertools
import os
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycomm.bench.common import accelerator
from pycomm.bench.common.timing import in_turns
from pycomm.bench.training.methods import Method
from pycomm.bench.training.train import (
    Config,
    Transformer,
    batches,
    loss_of,
    standard_library,
    wire_bytes,
)

SETTLE = 3  # untimed steps after a change of the method: DDP makes new buckets
PARTS = 3  # steps whose parts are timed, after the others


class Clock:
    """Times of a device: of this process's clock, read when the device has done its work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def memory(self, *, begins: bool = False) -> int:
        """Return the most bytes that were allocated since `begins`; on the CPU, since the start."""
        if self.device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        gpu = accelerator.api()
        if begins:
            gpu.reset_peak_memory_stats(self.device)
        return int(gpu.max_memory_allocated(self.device))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward: bf16 on a GPU."""
        if self.device.type != "cpu":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()


def tokens(config: Config, clock: Clock) -> Iterator[torch.Tensor]:
    """Yield this rank's sequences: of bytes of text, or random ones of a larger vocabulary."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if config.vocabulary == Config().vocabulary:
        for sequences in batches(standard_library()[0], config, rank, ranks):
            yield sequences.to(clock.device)
    shape = config.batch, config.context + 1
    given = torch.randint(config.vocabulary, shape, device=clock.device)
    while True:
        yield given


class Stepper:
    """A model that one method trains, step by step. Collective.

    Args:
        config, method: what trains how.
        net: the bare model, which methods share where they can.
        group: of the method's backend.
        clock: of the device.
        compute: seconds that a step computes at least, as a larger model's would.
    """

    def __init__(
        self,
        config: Config,
        method: Method,
        net: nn.Module,
        group: dist.ProcessGroup | None,
        clock: Clock,
        compute: float,
    ) -> None:
        self._clock, self._compute, self._data = clock, compute, tokens(config, clock)
        own = method.sharded or method.local  # no other method takes its model afterwards
        bare = Transformer(config).to(clock.device) if own else net
        given = bare, config.learning_rate, (0.9, 0.999), group
        self.system = method.start(*given, sync=False, fused=clock.device.type != "cpu")
        self.model = self.system.model
        if method.codec.startswith("topk") and isinstance(self.model, DistributedDataParallel):
            # Adam's second moments begin with a dense local gradient. A sparse one leaves zeros for
            # many steps, and torch takes their square roots several times slower on a CPU.
            with self.model.no_sync():
                self.step()

    def forward(self) -> torch.Tensor:
        with self._clock.autocast():
            return loss_of(self.model, next(self._data))

    def step(self) -> None:
        until = time.perf_counter() + self._compute
        self.forward().backward()
        if self._compute:
            time.sleep(max(0.0, until - time.perf_counter()))
        self.system.apply()

    def parts(self) -> dict[str, float]:
        """Return the median seconds of each part, of steps in which one waits for the other."""
        found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
        for _ in range(PARTS):
            times = [self._clock()]
            loss = self.forward()
            times.append(self._clock())
            loss.backward()
            times.append(self._clock())
            self.system.apply()
            times.append(self._clock())
            for part, begin, end in zip(found.values(), times, times[1:], strict=False):
                part.append(end - begin)
        return {name: statistics.median(seconds) for name, seconds in found.items()}


def alone(
    config: Config, net: nn.Module, group: dist.ProcessGroup | None, clock: Clock
) -> dict[str, Any]:
    """Return the steps of DDP with a hook that sends nothing, and their parts. Collective."""
    stepper = Stepper(config, Method("alone"), net, group, clock, 0.0)
    sizes: list[int] = []  # of buckets; while it is empty the next one is a step's first
    ready: list[float] = []

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not sizes:
            ready.append(clock())
        sizes.append(bucket.buffer().numel())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    assert isinstance(stepper.model, DistributedDataParallel)
    stepper.model.register_comm_hook(None, hook)
    seconds = in_turns({"": stepper.step}, 5 * SETTLE, settle=0, clock=clock)[""][SETTLE:]
    parts = stepper.parts()
    first = []
    for _ in range(PARTS):
        sizes.clear()
        begin = clock()
        stepper.step()
        first.append(ready[-1] - begin)
    shape = {"first": statistics.median(first), "last": sizes[-1] / sum(sizes)}
    return {"seconds": seconds, "memory": clock.memory(), "parts": parts, **shape}


def time_methods(
    config: Config,
    methods: list[Method],
    device: str,
    rounds: int,
    turn_seconds: float,
    compute: float,
    trace: str,
) -> Iterator[dict[str, Any]]:
    """Time methods in turns; yield what each has taken, and first a step that sends nothing.

    Most share one model. Collective.

    Args:
        config: of the model.
        methods: how gradients are averaged.
        device: "cpu", or the type of the accelerator.
        rounds, turn_seconds: turns of each method, and timed seconds of one.
        compute: see `Stepper`.
        trace: the file of a profile of a step of the last method; "": none.
    """
    if device != "cpu":
        ranks = int(os.environ["WORLD_SIZE"])
        clock = Clock(accelerator.take(int(os.environ["RANK"]), ranks))
    else:
        torch.set_num_threads(1)
        clock = Clock(torch.device("cpu"))
    dist.init_process_group("gloo")
    names = dict.fromkeys(method.backend for method in methods)
    groups = {name: dist.new_group(**accelerator.group(name, device)) for name in names}
    torch.manual_seed(0)
    net = Transformer(config).to(clock.device)
    yield {"method": "alone", **alone(config, net, next(iter(groups.values())), clock)}
    gc.collect()
    found: dict[str, dict[str, Any]] = {}
    for turn, method in itertools.product(range(rounds), methods):
        group = groups[method.backend]
        clock.memory(begins=True)
        stepper = Stepper(config, method, net, group, clock, compute)
        every = method.local.get("every", 1)
        begin = method.local.get("every", SETTLE)
        (last,) = in_turns({"": stepper.step}, 1, settle=begin - 1, clock=clock)[""]
        agreed = torch.tensor([max(2, min(40, round(turn_seconds / last / every)))])
        dist.broadcast(agreed, 0)
        timed = int(agreed) * every
        dist.barrier()
        before = wire_bytes()
        mine = found.setdefault(method.label, {"seconds": [], "sent": [], "memory": 0})
        mine["seconds"] += in_turns({"": stepper.step}, timed, settle=0, clock=clock)[""]
        dist.barrier()
        mine["sent"].append((wire_bytes() - before) / timed)
        mine["parts"] = {} if method.local else stepper.parts()
        if trace and method is methods[-1]:
            with torch.profiler.profile() as profile:
                stepper.step()
                clock()
            if dist.get_rank() == 0:
                profile.export_chrome_trace(trace)
        mine["memory"] = max(mine["memory"], clock.memory())
        if turn == rounds - 1:
            yield {"method": method.label, **mine}
        stepper.system.finish()
        del stepper
        gc.collect()
    dist.destroy_process_group()
