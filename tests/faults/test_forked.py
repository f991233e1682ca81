"""A forked child (a data loader's worker) holds a copy of its parent's group.

Every call must raise in the child, and must not be visible to the parent's peers.
"""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest

from pycomm import _C
from pycomm.errors import Error
from tests.ranks import run, run_processes

CALLS = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "a tiny all_reduce": lambda c, x: c.all_reduce(x[:4]),
    "all_gather": lambda c, x: c.all_gather(x, np.empty(c.size * x.size, np.float32)),
    "all_to_all": lambda c, x: c.all_to_all(x, np.empty_like(x)),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x, np.empty(x.size // c.size, np.float32)),
    "broadcast": lambda c, x: c.broadcast(x),
    "reduce": lambda c, x: c.reduce(x, np.empty_like(x)),
    "gather": lambda c, x: c.gather(x, np.empty(c.size * x.size, np.float32)),
    "scatter": lambda c, x: c.scatter(np.empty(c.size * x.size, np.float32), x),
    "all_reduce_coded": lambda c, x: c.all_reduce_coded(x, "quant:bits=8"),
    "barrier": lambda c, x: c.barrier(),
    "send": lambda c, x: c.send(x, 1 - c.rank),
    "recv": lambda c, x: c.recv(x, 1 - c.rank),
    "allocate": lambda c, x: c.allocate(10),
    "compare": lambda c, x: c.compare("parameters", 7),
}


def in_child(job):
    """Return the exit status of ``job()`` in a forked child."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            code = job()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raises(call):
    try:
        call()
    except Error as error:
        return 0 if "forked child" in str(error) else 2
    return 1


def every_call(c):
    x = np.ones(1000, np.float32)
    c.all_reduce(x)
    late = c.recv(np.empty(10, np.float32), 1 - c.rank)
    failed = {
        name: in_child(lambda call=call: raises(lambda: call(c, x))) for name, call in CALLS.items()
    }
    failed["wait"] = in_child(lambda: raises(late.wait))
    failed["done"] = in_child(lambda: raises(late.done))
    assert not any(failed.values()), failed

    def end_everything():
        nonlocal late, c
        c.abort("the child has had enough")
        c.close()
        late = c = None
        gc.collect()
        return 0

    assert in_child(end_everything) == 0
    x[:] = c.rank + 1
    c.all_reduce(x)  # unaffected by the child
    c.send(np.ones(10, np.float32), 1 - c.rank).wait()
    late.wait()
    assert set(x.tolist()) == {3.0}
    return True


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_nothing_that_a_child_calls_reaches_the_group(transport):
    assert all(run_processes(2, every_call, transport=transport))


def test_children_of_a_process_whose_ranks_are_threads():
    def job(c):
        failed = in_child(lambda: raises(lambda: c.all_reduce(np.ones(1000, np.float32))))
        c.barrier()
        return failed

    assert run(2, job) == [0, 0]


def test_a_device_group_in_a_child():
    group = _C.DeviceGroup(_C.Store.local(), 0, 1)
    x = np.ones(10, np.float32)
    args = (x.ctypes.data, 10, _C.DType.float32)
    assert in_child(lambda: raises(lambda: group.all_reduce(*args, _C.ReduceOp.sum))) == 0
    assert in_child(lambda: raises(group.check)) == 0
    assert in_child(lambda: group.abort("from the child") or 0) == 0
    group.all_reduce(*args, _C.ReduceOp.sum)
    group.check()
    group.close()


def own_group_in_a_child(c):
    def job():
        import tempfile

        from pycomm.communicator import Communicator, Store

        with tempfile.TemporaryDirectory() as folder:
            with Communicator(Store.file(folder), 0, 1) as own:
                own.all_reduce(np.ones(10, np.float32))
            grandchild = in_child(lambda: raises(lambda: c.barrier()))
            return grandchild or raises(lambda: c.barrier())

    assert in_child(job) == 0
    c.barrier()
    return True


def test_a_child_may_have_a_group_of_its_own():
    assert all(run_processes(2, own_group_in_a_child))


def test_a_child_drops_its_copy_of_a_queue():
    queue, done = _C.Queue(), threading.Event()
    queue.submit(done.set)
    assert done.wait(10)
    held = [queue]
    del queue

    def drop():
        held.clear()
        gc.collect()
        return 0

    assert in_child(drop) == 0
    held[0].submit(done.set)
