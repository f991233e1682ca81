"""Ranks with only a transport: threads over `local`, forked processes over `shm`."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from pycomm import _C
from tests.ranks import on_threads

Job = Callable[..., Any]
LIMIT = 60.0


def threads(size: int, job: Job) -> list[Any]:
    """Run ``job(transport, rank)`` on threads; return what each returned or raised."""
    store = _C.Store.local()

    def main(rank: int) -> Any:
        transport = _C.Transport("local", store, "test", rank, size, timeout=20.0)
        try:
            return job(transport, rank)
        finally:
            transport.close()

    return on_threads(range(size), main, LIMIT)


def _process(rank: int, size: int, folder: str, job: Job, prepare: Job, results: Any) -> None:
    try:
        prepare(rank)
        transport = _C.Transport("shm", _C.Store.file(folder), "test", rank, size, timeout=20.0)
        try:
            outcome = job(transport, rank)
        finally:
            transport.close()
    except Exception as error:
        error.args = (str(error), *error.args[1:], traceback.format_exc())
        outcome = error
    results.put((rank, outcome))


def processes(size: int, job: Job, prepare: Job = lambda rank: None) -> list[Any]:
    """Run ``job(transport, rank)`` on forked processes; the outcome of a killed rank is None.

    ``prepare(rank)`` runs in the process before the rendezvous.
    """
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    outcomes: list[Any] = [None] * size
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_process, args=(r, size, folder, job, prepare, results))
            for r in range(size)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LIMIT)
            assert worker.exitcode is not None, "a rank hangs"
    while not results.empty():
        rank, outcome = results.get()
        outcomes[rank] = outcome
    return outcomes


RUNNERS = {"local": threads, "shm": processes}


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def sample(seed: int, nbytes: int) -> np.ndarray:
    """Return random bytes that are finite numbers in every dtype (bytes stay below 0x40)."""
    return _sample(seed, nbytes).copy()


@lru_cache(maxsize=32)  # each rank compares with the data of all
def _sample(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, nbytes, dtype=np.uint8)
