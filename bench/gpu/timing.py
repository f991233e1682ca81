"""Timing of GPU kernels, and the bytes that each must move.

Calls on several sets of buffers, larger in total than the L2 cache, are captured in one CUDA graph,
so that the launch overhead of Python is excluded. Events time each replay, and the result is the
median of many replays.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from pycomm.bench.common import accelerator
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.base import Codec

SECONDS = 0.08  # per kernel


def bytes_moved(codec: Codec, op: str, numel: int) -> int:
    """Return the bytes that must cross the memory bus: each input once, each output once.

    A variable payload is written completely, with zeros after the used part.
    """
    floats = {"encode": 1, "encode_feedback": 3, "decode": 1, "decode_add": 2}[op]
    return 4 * numel * floats + codec.encoded_bytes(numel)


def sets_needed(set_bytes: int, l2_bytes: int) -> int:
    """Return how many sets of buffers to cycle through, so that none is still in L2 when reused."""
    return max(2, -(-3 * l2_bytes // set_bytes) + 1)


def call_of(run: Any, codec: Codec, op: str, numel: int) -> Callable[[], None]:
    """Return one call of a codec on buffers of its own."""
    x = torch.randn(numel, device=accelerator.kind())
    payload = codec.encode(x)
    if op == "decode":
        return lambda: run.decode(codec, payload, x)
    if op == "decode_add":
        return lambda: run.decode_add(codec, payload, x)
    residual = torch.randn_like(x) * 0.01 if op == "encode_feedback" else None
    args = EncodeArgs(x, payload, residual, residual, RandomKey(seed=1), 0)
    return lambda: run.encode(codec, args)


def measure(calls: list[Callable[[], None]]) -> tuple[float, str]:
    """Return the median seconds per call, and the method of timing."""
    gpu = accelerator.api()
    stream = gpu.Stream()
    stream.wait_stream(gpu.current_stream())  # which may still fill the calls' buffers
    with gpu.stream(stream):
        for call in calls:  # compiles, loads and warms up
            call()
    stream.synchronize()
    try:
        graph = gpu.CUDAGraph()
        with gpu.graph(graph, stream=stream):
            for call in calls:
                call()
    except RuntimeError:
        gpu.synchronize()
        with gpu.stream(stream):
            return _median(lambda: [call() for call in calls], stream) / len(calls), "events"
    with gpu.stream(stream):
        return _median(graph.replay, stream) / len(calls), "graph"


def _median(round_of_calls: Callable[[], Any], stream: torch.Stream) -> float:
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 10 or (time.perf_counter() < end and len(times) < 1000):
        times.append(accelerator.seconds(round_of_calls, stream))
    return statistics.median(times[2:])


def l2_bytes() -> int:
    """Size of the device's L2 cache."""
    return int(accelerator.api().get_device_properties(0).L2_cache_size)


def time_copy(numel: int) -> float:
    """Return GB/s, bytes read and written, of a device-to-device copy."""
    sets = sets_needed(8 * numel, l2_bytes())
    pairs = [[torch.randn(numel, device=accelerator.kind()) for _ in range(2)] for _ in range(sets)]
    seconds, _ = measure([lambda a=a, b=b: b.copy_(a) for a, b in pairs])
    return 8e-9 * numel / seconds
