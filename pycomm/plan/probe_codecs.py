"""What a core does with codecs, by itself and in an all-reduce."""

from __future__ import annotations

import array
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.pieces import built
from pycomm.plan.algorithms import Size, all_reduce
from pycomm.plan.cluster import Cluster, Link, Processor, Rates
from pycomm.plan.codecs import CODINGS
from pycomm.plan.probe_ranks import PAUSE, Ranks

REPEAT = 0.06  # seconds of each call of a codec


@dataclass(frozen=True)
class Codecs:
    """What a core does with buffers of one size."""

    numel: int
    memory: float
    rates: dict[str, Rates]


def measure(ranks: Ranks, numel: int, effort: float, *, busy: bool) -> Codecs:
    """All codecs, on all ranks at the same time that are `busy`; the others wait."""
    rates = {}
    for coding in CODINGS.values():
        if coding.spec:
            ranks.rest(f"{coding.name} {numel}")
            if not busy:
                continue
            rates[coding.name] = _rates(_C.Codec(coding.spec), numel, REPEAT * effort)
    return Codecs(numel, memory(numel), rates)


def in_use(group: Communicator, link: Link, found: Codecs, effort: float) -> Codecs:
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


def memory(numel: int) -> float:
    """Bytes per second that a sum of two arrays reads."""
    x, out = _values(numel), array.array("f", bytes(4 * numel))
    source, target = (_C.buffer(b, False)[0] for b in (x, out))
    inputs = [source, target]
    dtype, op = _C.DType.float32, _C.ReduceOp.sum
    return 8 * numel / _seconds(lambda: _C.reduce(dtype, op, inputs, target, numel), REPEAT)
