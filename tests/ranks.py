"""Ranks as threads or processes: run a function on each, rethrow the first error, never hang."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import queue
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from pycomm.communicator import Communicator, Store
from pycomm.errors import Error
from tests.extent import noting

Job = Callable[..., Any]
OPTIONS = {"transport": "shm", "timeout": 20.0}


class Hung(AssertionError):
    """Ranks were still running at the test's deadline."""


def join(threads: list[threading.Thread], limit: float) -> list[int]:
    """Wait until threads have fully ended; return the indices of those that have not in time.

    Python's own join returns while a thread still releases its memory. A fork in that moment
    leaves an allocator without fork handlers (the sanitizers') locked in the child forever.
    """
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        task = f"/proc/self/task/{thread.native_id}"
        while not thread.is_alive() and os.path.exists(task) and time.monotonic() < end:
            time.sleep(0.0001)
    return [place for place, thread in enumerate(threads) if thread.is_alive()]


@contextmanager
def without_threads() -> Iterator[None]:
    """Let no thread start but Python's: its stack would be larger than the address space."""
    libc, size = ctypes.CDLL(None), threading.stack_size(1 << 20)
    before, attributes = (ctypes.create_string_buffer(64) for _ in range(2))
    for each in (before, attributes):
        assert libc.pthread_getattr_default_np(each) == 0
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 47))
    assert libc.pthread_setattr_default_np(attributes) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(before) == 0
        threading.stack_size(size)


def refuse(call: int, error: int, arguments: Mapping[int, int] | None = None) -> None:
    """Let the kernel refuse this process a system call, or one with these arguments, by their
    places: a seccomp filter (linux/seccomp.h)."""
    load, equal, give, allowed = 0x20, 0x15, 0x06, 0x7FFF0000
    wanted = {0: call} | {16 + 8 * place: value for place, value in (arguments or {}).items()}
    steps = []
    for number, (place, value) in enumerate(wanted.items(), 1):
        behind = 2 * (len(wanted) - number) + 1
        steps += [(load, 0, 0, place), (equal, 0, behind, value)]
    steps += [(give, 0, 0, 0x00050000 | error), (give, 0, 0, allowed)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) != 0:
        pytest.skip("this kernel has no seccomp filters")


def on_threads(ranks: Iterable[int], main: Callable[[int], Any], limit: float) -> list[Any]:
    """Call ``main(rank)`` on a thread for each rank; return their results, or their errors.

    Raises:
        Hung: one is not done after ``limit`` seconds; the stacks of all threads are printed.
    """
    outcomes: dict[int, Any] = {}

    def keep(rank: int) -> None:
        try:
            outcomes[rank] = main(rank)
        except BaseException as error:
            outcomes[rank] = error

    ranks = list(ranks)
    threads = [threading.Thread(target=keep, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    if hung := join(threads, limit):
        faulthandler.dump_traceback()
        raise Hung(f"ranks {[ranks[place] for place in hung]} did not end within {limit} s")
    return [outcomes[rank] for rank in ranks]


def good(outcomes: list[Any]) -> list[Any]:
    """Return the outcomes of ranks, or raise the first error among them."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def communicator(store: Store, rank: int, size: int, **options: Any) -> Communicator:
    return Communicator(store, rank, size, **{**OPTIONS, **options})


def run(size: int, job: Job, *, limit: float = 60.0, **options: Any) -> list[Any]:
    """Run ``job(communicator)`` on ``size`` ranks that are threads; return what each returned.

    The first error of any rank is raised again, with the number of the rank in a note. If a rank is
    not done after ``limit`` seconds the stacks of all threads are printed and the test fails.
    """
    return good(attempt(size, job, limit=limit, **options))


def attempt(
    size: int,
    job: Job,
    *,
    limit: float = 60.0,
    member: Callable[..., Any] = communicator,
    of_rank: Callable[[int], dict[str, Any]] = lambda rank: {},
    **options: Any,
) -> list[Any]:
    """Run as `run` does, but return a rank's error as its outcome, for tests of errors.

    ``of_rank`` returns the options that differ between the ranks, and ``member`` makes of a store,
    rank, size and options what the job gets.
    """
    store = Store.local()

    def rank_main(rank: int) -> Any:
        ours = {**options, **of_rank(rank)}
        with noting(f"on rank {rank} of {size}"), member(store, rank, size, **ours) as one:
            return job(one)

    return on_threads(range(size), rank_main, limit)


def in_child(call: Callable[[], Any]) -> str:
    """Return what became of a call in a forked child: "refused" if it has raised for being one."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            call()
            code = 0
        except Exception as error:
            code = 1 if isinstance(error, Error) and "forked child" in str(error) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcomes = {0: "returned", 1: "refused", 2: "another error"}
    return outcomes.get(code, f"exit status {code}")


def _report(main: Callable[[int], Any], rank: int, results: Any) -> None:
    try:
        results.put((rank, True, main(rank)))
    except BaseException as error:
        results.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def in_processes(
    size: int, main: Callable[[int], Any], limit: float, method: str = "fork"
) -> list[Any]:
    """Call ``main(rank)`` in a process for each rank; return their results.

    One that returns None may end by any means (a test kills it); others must return.
    """
    context: Any = multiprocessing.get_context(method)
    results = context.Queue()
    processes = [context.Process(target=_report, args=(main, r, results)) for r in range(size)]
    for process in processes:
        process.start()
    outcomes: list[Any] = [None] * size
    end = time.monotonic() + limit
    missing = set(range(size))
    try:
        while missing and time.monotonic() < end:
            try:
                rank, fine, outcome = results.get(timeout=0.1)
            except queue.Empty:
                missing -= {r for r in missing if processes[r].exitcode not in (None, 0)}
                continue
            missing.discard(rank)
            if not fine:
                raise AssertionError(f"rank {rank} of {size}: {outcome}")
            outcomes[rank] = outcome
    finally:
        for process in processes:
            process.join(5.0 if not missing else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
    if missing:
        raise Hung(f"ranks {sorted(missing)} did not end within {limit} s")
    return outcomes


def run_processes(
    size: int,
    job: Job,
    *,
    limit: float = 60.0,
    method: str = "fork",
    prepare: Job | None = None,
    member: Callable[..., Any] = communicator,
    **options: Any,
) -> list[Any]:
    """Run ``job(communicator)`` on ranks that are processes, as `in_processes` does.

    ``prepare(rank)`` runs in the process before the rendezvous; ``member`` is that of `attempt`.
    """
    with tempfile.TemporaryDirectory() as folder:
        main = partial(_process_main, folder, size, job, prepare, member, options)
        return in_processes(size, main, limit, method)


def _process_main(
    folder: str,
    size: int,
    job: Job,
    prepare: Job | None,
    member: Callable[..., Any],
    options: dict[str, Any],
    rank: int,
) -> Any:
    if prepare:
        prepare(rank)
    with member(Store.file(folder), rank, size, **options) as one:
        return job(one)


def on_processes(
    size: int, then: Callable[[list[Any]], None] | None = None, **options: Any
) -> Callable[[Job], Callable[[], None]]:
    """Make a test of a function of a communicator, which runs on ranks that are forked processes.

    Args:
        then: is called with the results of all ranks.
        options: of `run_processes`.
    """

    def decorate(job: Job) -> Callable[[], None]:
        def test() -> None:
            results = run_processes(size, job, **options)
            if then:
                then(results)

        test.__name__, test.__doc__, test.__module__ = job.__name__, job.__doc__, job.__module__
        return test

    return decorate
