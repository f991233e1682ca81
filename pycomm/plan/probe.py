"""`plan probe`: measures links, cores and codecs of the ranks it runs on, in under 30 seconds.

Started alone it starts two ranks on this machine; under torchrun every rank calls it, on nodes that
share a folder. Two ranks measure each level of links, while the others wait; all ranks measure
codecs at the same time, since that is how they will be used.
"""

from __future__ import annotations

import array
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pycomm import _C
from pycomm.communicator import Communicator, Store
from pycomm.pieces import built
from pycomm.plan.algorithms import Size, all_reduce
from pycomm.plan.cluster import Cluster, Link, Processor, Rates
from pycomm.plan.codecs import CODINGS
from pycomm.plan.probed import Probe, cores_of_process, machine_of_process

SECONDS = 2.5  # of one level of links
SHORT, FIRST, LONGEST = 8, 1 << 20, 64 << 20  # bytes of messages
NUMELS = 1 << 18, 16 << 20  # of the buffers that codecs work on: caches hold the first
PAUSE = 0.03  # seconds after which a token bucket is full again
REPEAT = 0.06  # seconds of each call of a codec
MANY = 256  # small messages that are on their way at once


class Ranks:
    """The ranks of a probe, and what they tell each other."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.store, self.rank, self.size = Store.file(str(folder)), rank, size
        self.group = Communicator(self.store, rank, size, group="probe", timeout=60)

    def gather(self, name: str, mine: str) -> list[str]:
        """What each rank says, in rank order."""
        self.store.set(f"probe/{name}/{self.rank}", mine)
        keys = (f"probe/{name}/{rank}" for rank in range(self.size))
        return [self.store.get(key, 60.0).decode() for key in keys]

    def nodes(self) -> list[int]:
        """The node of each rank."""
        levels = self.group.core.levels
        if levels:
            return levels
        before = self.group.wire_bytes()
        self.group.all_reduce(bytearray(1024))
        return list(range(self.size)) if self.group.wire_bytes() > before else [0] * self.size


def run(folder: Path, rank: int, size: int, effort: float = 1.0) -> Probe | None:
    """Measure; rank 0 gets the result, the others None.

    Args:
        folder: where the ranks meet; shared by all, and new.
        rank: our number.
        size: how many ranks there are.
        effort: share of the usual time and memory: less is quicker, and worse.

    Raises:
        ValueError: there is only one rank.
    """
    if size < 2:
        raise ValueError("one rank has no links to probe: start two or more")
    ranks = Ranks(folder, rank, size)
    nodes = ranks.nodes()
    partners = {
        "inter": next((r for r in range(size) if nodes[r] != nodes[0]), None),
        "intra": next((r for r in range(1, size) if nodes[r] == nodes[0]), None),
    }
    sizes = [max(1 << 16, int(numel * effort) >> 16 << 16) for numel in NUMELS]
    memory = _memory(sizes[0])
    links: dict[str, Link | None] = {}
    pair: Communicator | None = None
    for level, partner in partners.items():
        links[level] = None
        if partner is not None and rank in (0, partner):
            links[level], group = _link(ranks, level, int(rank != 0), memory, SECONDS * effort)
            pair = pair or group
        ranks.group.barrier()
    measured = [_codecs(ranks, numel, effort) for numel in sizes]
    machines = ranks.gather("machine", machine_of_process())
    inter = links["inter"]
    if pair is not None and inter is not None:
        measured = [_in_use(pair, inter, found, effort) for found in measured]
    ranks.group.barrier()
    if rank != 0:
        return None
    here = machines.count(machines[0])
    return Probe(
        ranks=size,
        inter=inter,
        intra=links["intra"],
        memory=measured[0].memory,
        codecs=measured[0].rates,
        far_memory=measured[1].memory,
        far_codecs=measured[1].rates,
        span=(4.0 * here * sizes[0], 4.0 * here * sizes[1]),
        cores=cores_of_process(),
        machines=len(set(machines)),
        nodes=len(set(nodes)),
        device=_C.simd_level(),
    )


# -------------------------------------------------------------------------- links


def _link(
    ranks: Ranks, level: str, member: int, memory: float, budget: float
) -> tuple[Link, Communicator]:
    """From all-reduces of two ranks, short and long.

    A short one waits for one message each way. Two shots between two ranks send a buffer of b bytes
    once each way, fold it, and wait for two rounds; so the rate is what a longer buffer takes more
    time for. The core's time gives what a byte costs there, less folding.
    """
    algos = {name: "auto" if level == "intra" else name for name in ("one_shot", "two_shot")}
    groups = {
        name: Communicator(ranks.store, member, 2, group=f"probe-{level}-{name}", algo=algo)
        for name, algo in algos.items()
    }
    short, _ = _all_reduces(groups["one_shot"], SHORT, max(5, round(120 * budget)))
    group = groups["two_shot"]
    seconds, core = _all_reduces(group, FIRST, 4)
    # All sizes cost their longer part, as the planner's formulas do; so they are long.
    length, times = FIRST, max(3, min(20, round(budget / 4 / seconds)))
    while length < LONGEST and 3 * seconds * (2 * length / FIRST) < budget / 2:
        length *= 2
    seconds, core = _all_reduces(group, FIRST, times)
    longer, longer_core = _all_reduces(group, length, 5) if length > FIRST else (seconds, core)
    rate, per_byte = FIRST / seconds, core / FIRST
    if length > FIRST:
        rate = (length - FIRST) / (longer - seconds)
        per_byte = (longer_core - core) / (length - FIRST)
    message = min(short / 2, _message(groups["one_shot"]))
    rested, _ = _all_reduces(group, FIRST, 5, pause=PAUSE)
    link = Link(
        name="probed",
        rate=rate,
        latency=max(0.0, short - message),
        message=message if level == "inter" else 0.0,
        byte=max(0.0, per_byte - 1 / memory) if level == "inter" else 0.0,
        burst=max(0.0, seconds - rested) * rate if level == "inter" else 0.0,
    )
    return link, group


def _message(group: Communicator) -> float:
    """Seconds of one of many small messages each way, none of which waits for another."""
    peer, out = 1 - group.rank, bytearray(SHORT)
    samples = []
    for _ in range(5):
        group.barrier()
        begin = time.perf_counter()
        requests = [group.recv(bytearray(SHORT), peer) for _ in range(MANY)]
        requests += [group.send(out, peer) for _ in range(MANY)]
        for request in requests:
            request.wait()
        samples.append((time.perf_counter() - begin) / MANY)
    return min(samples)


def _all_reduces(
    group: Communicator, size: int, times: int, *, pause: float = 0.0
) -> tuple[float, float]:
    """Seconds of one all-reduce, and of a core in it: medians, and the same on both ranks."""
    data = group.allocate(size // 4)
    wall, core = [], []
    group.all_reduce(data)
    for _ in range(times):
        if pause:
            time.sleep(pause)
            group.barrier()
        begin, begin_core = time.perf_counter(), time.process_time()
        group.all_reduce(data)
        wall.append(time.perf_counter() - begin)
        core.append(time.process_time() - begin_core)
    found = array.array("d", [statistics.median(wall), statistics.fmean(core)])
    address = _C.buffer(found, True)[0]
    group.core.all_reduce(address, len(found), _C.DType.float64, _C.ReduceOp.max)
    return found[0], found[1]


# -------------------------------------------------------------------------- codecs


@dataclass(frozen=True)
class Codecs:
    """What a core does with buffers of one size."""

    numel: int
    memory: float
    rates: dict[str, Rates]


def _codecs(ranks: Ranks, numel: int, effort: float) -> Codecs:
    """All codecs, on all ranks at the same time."""
    rates = {}
    for coding in CODINGS.values():
        if coding.spec:
            ranks.group.barrier()
            rates[coding.name] = _rates(_C.Codec(coding.spec), numel, REPEAT * effort)
    return Codecs(numel, _memory(numel), rates)


def _in_use(group: Communicator, link: Link, found: Codecs, effort: float) -> Codecs:
    """Correct decoding by what a core needs in an all-reduce beyond all that is known, or less.

    An all-reduce works on segments, which caches hold where they do not hold the buffer. Waiting
    only adds to a core's time, so the least counts. Long buffers are only as long as the link sends
    without a codec in half a second.
    """
    longest = int(link.rate * 0.5 * effort) // 4 >> 16 << 16
    numel = max(1 << 16, min(found.numel, longest))
    data, source = array.array("f", bytes(4 * numel)), _values(numel)
    cluster = Cluster(2, link, processor=Processor("probed", found.memory, found.rates))
    rates = dict(found.rates)
    for name, known in found.rates.items():
        coding, core = CODINGS[name], []
        for _ in range(4):
            data[:] = source
            time.sleep(PAUSE)  # as between the buckets of a step: others had the caches
            group.barrier()
            begin = time.process_time()
            group.core.all_reduce_coded(_C.buffer(data, True)[0], built(coding.spec, numel))
            core.append(time.process_time() - begin)
        way = "gather" if coding.combine == "gather" else "two_shot"
        expected = all_reduce(cluster, coding, way, Size.of(numel, coding)).processor
        decodings = 1.0 if way == "gather" else 1.5  # of the whole buffer, between two ranks
        beyond = (min(core) - expected) / decodings / (4 * numel)
        decode = max(1 / known.decode + beyond, 0.2 / known.decode)
        rates[name] = replace(known, decode=1 / decode)
    return replace(found, rates=rates)


def _values(numel: int) -> array.array[float]:
    """Normally distributed float32: a tile of them, each time a little larger, so that none are
    equal, which top-k would take long to choose among."""
    tile, out = _tile(), array.array("f", bytes(4 * numel))
    source, target = (_C.buffer(b, False)[0] for b in (tile, out))
    dtype, op = _C.DType.float32, _C.ReduceOp.premul_sum
    for i in range(numel // len(tile)):
        place = target + 4 * i * len(tile)
        _C.reduce(dtype, op, [source], place, len(tile), factor=1 + i / 1024)
    return out


@cache
def _tile() -> array.array[float]:
    generator = random.Random(0)
    return array.array("f", (generator.gauss(0, 1) for _ in range(1 << 16)))


def _seconds(call: Callable[[], object], budget: float) -> float:
    """Of a core, one call."""
    call()
    samples: list[float] = []
    while len(samples) < 3 or sum(samples) < budget:
        begin = time.thread_time()
        call()
        samples.append(time.thread_time() - begin)
    return statistics.median(samples)


def _rates(codec: _C.Codec, numel: int, budget: float) -> Rates:
    x, out = _values(numel), array.array("f", bytes(4 * numel))
    payload = bytearray(codec.encoded_bytes(numel))
    residual = array.array("f", bytes(4 * numel))
    source, target, code, owed = (_C.buffer(b, False)[0] for b in (x, out, payload, residual))
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(source, numel, code),
        "decode": lambda: codec.decode(code, target, numel),
        "decode_add": lambda: codec.decode_add(code, target, numel),
        "encode_fed": lambda: codec.encode(source, numel, code, residual=owed, new_residual=owed),
    }
    rates = {name: 4 * numel / _seconds(call, budget) for name, call in calls.items()}
    return Rates(**rates, measured=True)


def _memory(numel: int) -> float:
    """Bytes per second that a sum of two arrays reads."""
    x, out = _values(numel), array.array("f", bytes(4 * numel))
    source, target = (_C.buffer(b, False)[0] for b in (x, out))
    inputs = [source, target]
    dtype, op = _C.DType.float32, _C.ReduceOp.sum
    return 8 * numel / _seconds(lambda: _C.reduce(dtype, op, inputs, target, numel), REPEAT)
