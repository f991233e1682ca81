"""The operation queue: operations run in the order of issue, on any thread."""

from __future__ import annotations

import threading
import time

import pytest

from pycomm._test import Queue


def test_submitted_operations_run_in_order():
    queue, seen = Queue(), []
    for i in range(100):
        queue.submit(lambda i=i: seen.append((i, threading.get_ident())))
    queue.run(lambda: None)
    assert [i for i, _ in seen] == list(range(100))
    assert len({thread for _, thread in seen} | {threading.get_ident()}) == 2


def test_run_is_on_the_calling_thread_after_what_is_queued():
    queue, seen = Queue(), []
    queue.run(lambda: seen.append(threading.get_ident()))
    queue.submit(lambda: (time.sleep(0.05), seen.append("queued")))
    queue.run(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident(), "queued", threading.get_ident()]


def test_what_is_submitted_during_a_run_waits_for_it():
    queue, seen = Queue(), []

    def op():
        queue.submit(lambda: seen.append("submitted"))
        time.sleep(0.02)
        seen.append("run")

    queue.run(op)
    queue.run(lambda: seen.append("last"))
    assert seen == ["run", "submitted", "last"]


def test_an_operation_on_the_thread_may_run_another():
    queue, seen = Queue(), []
    queue.submit(lambda: queue.run(lambda: seen.append("inner")))
    queue.run(lambda: seen.append("outer"))
    assert seen == ["inner", "outer"]


def test_exceptions_pass_through_and_the_queue_goes_on():
    queue, seen = Queue(), []

    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        queue.run(fail)
    queue.submit(lambda: seen.append(1))
    queue.run(lambda: seen.append(2))
    assert seen == [1, 2]


def test_the_end_of_a_queue_finishes_what_is_queued():
    queue, seen = Queue(), []
    for i in range(10):
        queue.submit(lambda i=i: (time.sleep(0.002), seen.append(i)))
    del queue
    assert seen == list(range(10))


def test_callers_on_many_threads_take_turns():
    queue, running, most = Queue(), [], []

    def op():
        running.append(1)
        most.append(len(running))
        time.sleep(0.001)
        running.pop()

    threads = [
        threading.Thread(target=lambda: [queue.run(op) for _ in range(10)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(10):
        queue.submit(op)
    for thread in threads:
        thread.join()
    queue.run(lambda: None)
    assert len(most) == 50
    assert max(most) == 1
