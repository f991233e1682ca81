"""The Python Communicator: the arrays that it accepts, and its description of itself."""

from __future__ import annotations

import array as arrays
import ctypes
import gc
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pycomm import _C, stores
from pycomm.communicator import Communicator, Piece, Store, built
from pycomm.env import env
from pycomm.errors import Error, Timeout
from tests.collectives.ways import WAYS
from tests.ranks import attempt, run
from tests.torch.interpreter import free_port


def test_one_rank_needs_no_store():
    with Communicator(None, 0, 1) as c:
        x = np.arange(5, dtype=np.float32)
        c.all_reduce(x, "premul_sum", factor=2)
        c.broadcast(x)
        c.barrier()
        out = np.empty(5, np.float32)
        c.all_gather(x, out)
        assert np.array_equal(out, [0, 2, 4, 6, 8])
        assert (c.rank, c.size, c.describe()) == (0, 1, "1 rank")


def test_tensors_arrays_and_buffers_are_all_the_same():
    def job(c):
        tensor = torch.ones(6, dtype=torch.bfloat16).view(2, 3)
        c.all_reduce(tensor)
        eighth = torch.ones(4, dtype=torch.float8_e4m3fn)
        c.all_reduce(eighth)
        array = np.ones((2, 3), np.complex64)
        c.all_reduce(array)
        flags = np.array([c.rank == 0, False])
        c.all_reduce(flags, "max")
        buffer = bytearray([1, 2, 3])
        c.all_reduce(buffer)
        view = memoryview(bytearray(8)).cast("B")
        c.all_reduce(view)
        for code in "bBhHiIlLqQfd":
            items = arrays.array(code, [1, 2, 3])
            c.all_reduce(items)
            assert items == arrays.array(code, [2, 4, 6]), code
        least = arrays.array("b", [-1 if c.rank else 1])
        c.all_reduce(least, "min")
        assert least[0] == -1
        return (
            tensor.tolist() == [[2.0] * 3] * 2
            and eighth.float().tolist() == [2.0] * 4
            and array.tolist() == [[2 + 0j] * 3] * 2
            and flags.tolist() == [True, False]
            and buffer == bytearray([2, 4, 6])
        )

    assert all(run(2, job))


def test_tensors_that_cannot_be_used_are_refused():
    read_only = np.ones(3)
    read_only.flags.writeable = False
    with Communicator(None, 0, 1) as c:
        for data, words in (
            (torch.ones(4, 4).t(), "not contiguous"),
            (torch.ones(4, dtype=torch.complex64).conj(), "not contiguous"),
            (torch._neg_view(torch.ones(4)), "not contiguous"),  # as the imaginary part of conj()
            (torch.ones(4, device="meta"), "on meta; move it"),
            (torch.ones(3, dtype=torch.complex32), r"dtype torch\.complex32 is not known"),
            (read_only, "cannot change; pass a copy"),
            (arrays.array("u", "text"), "cannot tell the dtype of array"),
        ):
            with pytest.raises(Error, match=words):
                c.all_reduce(data)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "smoke"}, 'unknown transport "smoke"; use one of auto, shm, tcp'),
        ({"algo": "best"}, 'unknown algo "best"; use one of auto, flat, direct, .*ring'),
    ],
)
def test_unknown_options_list_the_known_ones(options, words):
    with pytest.raises(Error, match=words):
        Communicator(Store.local(), 0, 2, **options)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_outside_the_group_are_refused(rank, size):
    with pytest.raises(Error, match=f"rank {rank} of {size} ranks"):
        Communicator(Store.local(), rank, size)


def test_from_env_joins_the_group_of_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    env.cache_clear()
    try:
        assert Communicator.from_env(str(tmp_path)).size == 1
        monkeypatch.delenv("RANK")
        env.cache_clear()
        with pytest.raises(Error, match="torchrun"):
            Communicator.from_env(str(tmp_path))
        monkeypatch.delenv("WORLD_SIZE")
        monkeypatch.setenv("PMI_RANK", "0")  # as mpirun sets it
        monkeypatch.setenv("PMI_SIZE", "1")
        env.cache_clear()
        assert Communicator.from_env(str(tmp_path / "mpi")).size == 1
    finally:
        monkeypatch.undo()
        env.cache_clear()


@pytest.mark.parametrize("taken", [False, True])
def test_an_address_of_before_in_the_store_of_torchrun_is_looked_up_again(monkeypatch, taken):
    # Ranks that are started again have the same key.
    monkeypatch.setattr(stores, "_LOOK", 0.2)
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = _C.CommunicatorOptions()
    before = _C.StoreEndpoint("", options)
    words = before.handle.split()
    if taken:  # as PYCOMM_PORTS makes likely
        words[2] = words[2][::-1]
    else:
        del before
    agent.set("key", " ".join(words))

    def at(rank):
        return stores._of_torchrun(("127.0.0.1", agent.port), "key", 0, rank, options)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(at, 1)
        time.sleep(0.5)
        at(0).set("word", "new")
        assert other.result(20).get("word", 5.0) == b"new"


@pytest.fixture
def port():
    return free_port()


def test_an_attempt_to_meet_that_failed_may_be_repeated(monkeypatch, port):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    options = _C.CommunicatorOptions()
    options.timeout = 0.2
    with pytest.raises(Timeout):
        stores.at_master(1, options)  # rank 0 comes later
    stores.at_master(0, options).set("word", "first")
    found = _C.Store.find(f"127.0.0.1:{port}", 0, 1, options, 5.0)
    assert found.get("word", 0.0) == b"first"


JOIN = """
import os, sys
import numpy as np
from pycomm import Communicator

print("ready", flush=True)
sys.stdin.readline()
for number in (1, 2):  # the second group meets at the same address
    with Communicator.from_env(timeout=float(sys.argv[1])) as group:
        x = np.full(3, group.rank + number, np.float32)
        group.all_reduce(x)
        print(group.size, x.tolist(), "torch" in sys.modules)
"""


def joined_at(port, size, timeout=20, **variables):
    """The output and exit status of ranks that meet at a port of this host."""
    started = []
    for rank in range(size):
        names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        names |= {name: value[rank] for name, value in variables.items()}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", JOIN, str(timeout)],
                env=os.environ | {name: str(value) for name, value in names.items() if value != ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for one in started:  # their imports take no part of the timeout
            assert one.stdout.readline() == "ready\n"
        for one in started:
            one.stdin.write("\n")
            one.stdin.flush()
        outputs = [one.communicate(timeout=60)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    return outputs, [one.returncode for one in started]


@pytest.mark.parametrize("secrets", [("", "", ""), ("a secret of 24 characters",) * 3])
def test_from_env_needs_no_folder_at_a_master_port(port, secrets):
    outputs, statuses = joined_at(port, 3, PYCOMM_SECRET=secrets)
    assert statuses == [0, 0, 0], outputs
    assert outputs[0].startswith("pycomm: version ")  # rank 0 tells how the group was made
    results = [re.sub("pycomm: .*\n", "", output) for output in outputs]
    assert set(results) == {"3 [6.0, 6.0, 6.0] False\n3 [9.0, 9.0, 9.0] False\n"}


def test_from_env_says_why_ranks_do_not_meet(port):
    outputs, _ = joined_at(port, 2, 3, PYCOMM_SECRET=("one secret", "another one"))
    assert "or with other PYCOMM_SECRET or PYCOMM_TLS" in outputs[1]
    outputs, _ = joined_at(port, 2, 3, WORLD_SIZE=(2, 3))
    assert re.search("size=2 .* size=3 .*start all ranks with the same", outputs[0]), outputs
    with socket.create_server(("127.0.0.1", port)):
        outputs, _ = joined_at(port, 1, 3, RANK=(0,), WORLD_SIZE=(2,))
        assert f"rank 0 cannot listen at 127.0.0.1:{port}" in outputs[0]
    outputs, _ = joined_at(port, 1, 2, RANK=(1,), WORLD_SIZE=(2,))
    assert re.search(rf"rank 0 did not listen at \S+:{port} within 2000 ms", outputs[0]), outputs
    outputs, _ = joined_at(port, 1, 2, WORLD_SIZE=(2,), MASTER_ADDR=("",))
    assert "set them to a host and a port, or pass a folder" in outputs[0]
    outputs, _ = joined_at(port, 1, 2, WORLD_SIZE=(2,), MASTER_ADDR=("no.such.host.invalid",))
    assert "MASTER_ADDR=no.such.host.invalid has no address" in outputs[0]


# --------------------------------------------------------- residuals, and arrays that cannot change


def test_a_residual_is_fed_back():
    def job(c):
        x = np.linspace(-1, 1, 512, dtype=np.float32)
        residual, total = np.zeros_like(x), np.zeros(512)
        for step in range(64):
            y = x.copy()
            c.all_reduce_coded(y, "int2", residual=residual, step=step)
            total += y
        return np.abs(total / 64 - x).max(), residual

    (off, residual), _ = run(2, job)
    assert np.abs(residual).max() > 0
    assert off < 0.35  # the owners keep no residual here: their rounding stays


@pytest.mark.parametrize(
    ("data", "codec", "residual", "says"),
    [
        (np.ones(3), "int8", None, "takes float32, not float64"),
        (np.ones(3, np.float32), "int9", None, 'unknown codec "int9": the codecs are'),
        (np.ones(3, np.float32), "int8", np.ones(4, np.float32), "4 float32, its piece needs 3"),
        (np.ones(3, np.float32), [Piece(3, "int8")], np.ones(3, np.float32), "their own residuals"),
    ],
)
def test_wrong_codecs_and_residuals_are_refused(data, codec, residual, says):
    with Communicator(None, 0, 1) as c, pytest.raises(Error, match=says):
        c.all_reduce_coded(data, codec, residual=residual)


class Exported:
    """An array that has DLPack alone, as bfloat16 of TensorFlow and JAX has."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **given):
        return self._array.__dlpack__(**given)


def test_arrays_with_dlpack_alone_are_refused():
    with Communicator(None, 0, 1) as c, pytest.raises(Error, match=r"torch.from_dlpack\(x\)"):
        c.all_reduce(Exported(torch.ones(3, dtype=torch.bfloat16)))


def test_a_group_says_how_it_talks_and_counts_its_bytes():
    def job(c):
        def sent() -> tuple[int, int]:
            before = c.wire_bytes(), c.sent_bytes()
            c.all_reduce(np.ones(1000, np.float32))
            return c.wire_bytes() - before[0], c.sent_bytes() - before[1]

        # Further sockets of a lane do their handshake while the first is in use already.
        return c.describe(), repr(c), *min(sent() for _ in range(10))

    text, shown, wire, sent = run(2, job)[0]
    assert text.startswith("2 ranks: shm with 1")
    assert shown == f"<Communicator rank 0 of {text}>"
    assert wire == 0
    assert sent >= 4000
    text, _, wire, sent = run(2, job, transport="tcp")[0]
    assert "tcp" in text
    assert wire == sent
    assert 4000 <= wire < 4500


def test_a_closed_communicator_says_so():
    c = Communicator(None, 0, 1)
    c.close()
    c.close()
    assert repr(c) == "<Communicator closed>"
    with pytest.raises(Error, match="closed"):
        c.barrier()


def test_a_request_keeps_its_group_and_its_buffer():
    def job(c):
        request = c.recv(np.empty(3), 0)
        c.send(np.ones(3), 0).wait()
        return request

    (request,) = run(1, job)
    gc.collect()
    request.wait()
    assert request.buffer.tolist() == [1, 1, 1]


@pytest.mark.parametrize("way", WAYS)
def test_the_group_keeps_what_a_dropped_request_uses(way):
    numel = 1 << 20  # of which a part travels later

    def job(c):
        array = np.full(numel, 3, np.float32)
        c.send(array, 0) if c.rank else c.recv(array, 1, tag=1)
        kept = weakref.ref(array)
        del array
        gc.collect()
        assert kept() is not None
        c.barrier()
        if c.rank:
            c.send(np.ones(numel, np.float32), 0, tag=1).wait()
        else:
            values = np.zeros(numel, np.float32)
            c.recv(values, 1).wait()
            assert (values == 3).all()
        deadline = time.monotonic() + 20
        while kept() is not None:  # other transfers of the process let go of it
            assert time.monotonic() < deadline
            c.send(np.ones(1), c.rank)
            c.recv(np.ones(1), c.rank).wait()
        c.barrier()

    run(2, job, **WAYS[way])


def test_a_buffer_cannot_be_resized_while_it_is_used():
    def job(c):
        data = bytearray(2)
        request = c.recv(data, 0)
        with pytest.raises(BufferError):
            data.append(0)
        c.send(b"ab", 0).wait()
        request.wait()
        data.append(0)
        assert data == b"ab\0"

    run(1, job)


# ------------------------------------------------------------------------------ invalid arguments
# The Communicator refuses them before a byte is sent. Each check ends with a sum, to show that the
# group is still usable.


ways = pytest.mark.parametrize("way", WAYS)
F32 = _C.DType.float32
HUGE = [2**63 - 1, 2**62, 2**62 + 1, 2**61 + 3]  # times four they are small, or negative


def works(c: Communicator) -> None:
    x = np.ones(3, np.float32)
    c.all_reduce(x)
    assert x.tolist() == [c.size] * 3


@ways
def test_counts_that_are_negative_or_wrap(way):
    def job(c):
        around_in, around_out = np.full(6000, 5.0), np.zeros(6000)
        given, out = around_in[2000:2002], around_out[2000:2002]
        for counts in ([-1, 3], [3, -1], [2**63, 2 - 2**63], [2**64 - 1, 3], [1.0, 1.0], [None, 2]):
            with pytest.raises(Error, match="all_to_all: input"):
                c.all_to_all(given, out, send_counts=counts, recv_counts=counts)
            with pytest.raises(Error, match="all_to_all: out"):
                c.all_to_all(given, out, send_counts=[1, 1], recv_counts=counts)
        for numel in (-1, 2**63, 2**64, 2**64 + 1, 1.5, "4", None):
            with pytest.raises(Error, match="allocate: numel"):
                c.allocate(numel)
        for numel in HUGE:
            with pytest.raises(Error, match=r"no memory holds|heap of this rank is"):
                c.allocate(numel, "float64")
        assert not around_out.any()
        works(c)

    run(2, job, **WAYS[way])


@ways
def test_addresses_with_sizes_that_no_memory_holds(way):
    def job(c):
        x = np.ones(64, np.float32)
        at, core, total = x.ctypes.data, c.core, _C.ReduceOp.sum
        peer = 1 - c.rank
        for n in HUGE:
            parts = _C.Parts([(at, n), (at, n)])
            for call in (
                lambda n=n: core.run("all_reduce", at, at, n, F32, total),
                lambda n=n: core.run("reduce_scatter", at, at, n, F32, total),
                lambda parts=parts: core.run("reduce_scatter", parts, at, 0, F32, total),
                lambda n=n: core.run("all_gather", at, at, n, F32),
                lambda parts=parts: core.run("all_gather", at, parts, 0, F32),
                lambda parts=parts: core.run("all_to_all", parts, parts, 0, F32),
                lambda n=n: core.run("broadcast", at, at, n, F32, total, 0),
                lambda n=n: core.run("reduce", at, at, n, F32, total, 0),
                lambda n=n, parts=parts: core.run("gather", at, parts, n, F32, total, 0),
                lambda n=n, parts=parts: core.run("scatter", parts, at, n, F32, total, 0),
                lambda n=n: core.send(at, 4 * n, peer, 0),
                lambda n=n: core.recv(at, 4 * n, peer, 0),
            ):
                with pytest.raises((Error, TypeError), match=r"memory|incompatible"):
                    call()
        # Each part fits, but their sum overflows.
        for n in (2**60, 2**61 - 1):
            parts = _C.Parts([(at, n), (at, n)])
            with pytest.raises(Error, match="memory"):
                core.run("all_gather", at, parts, 0, F32)
            with pytest.raises(Error, match="memory"):
                core.run("all_gather", at, at, n, F32)
        # The end of the buffer lies before its start.
        with pytest.raises(Error, match="memory"):
            core.run("all_reduce", 2**64 - 64, 2**64 - 64, 2**40, F32, total)
        works(c)

    run(2, job, **WAYS[way])


def test_pieces_that_wrap():
    codec = built("quant:bits=8", 8)
    assert codec.numel == 8
    pieces = _C.Pieces()
    spec = _C.Codec("quant:bits=8")
    pieces.add(8, spec)
    for numel in (2**64 - 8, 2**63, 2**61):
        with pytest.raises(Error, match="no memory holds"):
            pieces.add(numel, spec)
    assert pieces.numel == 8

    def job(c):
        x = np.ones(8, np.float32)
        many = _C.Pieces()
        many.add(2**60, spec)
        with pytest.raises(Error, match="memory"):
            c.core.run_coded("reduce_scatter", x.ctypes.data, x.ctypes.data, many)
        works(c)

    run(8, job)


def sized(*sizes):
    return [np.zeros(n, np.float32) for n in sizes]


LISTS = {
    "all_gather": lambda c, one, parts: c.all_gather(one, parts),
    "reduce_scatter": lambda c, one, parts: c.reduce_scatter(parts, one),
    "all_to_all": lambda c, one, parts: c.all_to_all(parts, sized(1, 1, 1)),
    "gather": lambda c, one, parts: c.gather(one, parts),
    "scatter": lambda c, one, parts: c.scatter(parts, one),
}


@ways
@pytest.mark.parametrize("op", LISTS)
def test_a_list_that_is_wrong_for_one_rank_ends_the_group_on_all(way, op):
    over = threading.Event()

    def job(c):
        wrong = c.rank == 0 or op in ("all_gather", "reduce_scatter")
        try:
            LISTS[op](c, *sized(1), sized(1 + wrong, 1, 1))
            c.barrier()  # a gather may have ended where it has only sent
        finally:
            over.set() if c.rank else over.wait(10)  # rank 0 neither goes on nor leaves

    first, *others = attempt(3, job, **WAYS[way])
    assert str(first).startswith(f"rank 0: {op} has ")
    for error in others:
        assert isinstance(error, Error)
        assert not isinstance(error, Timeout)
        assert f"rank 0 was aborted: its {op} has " in str(error)


@ways
def test_a_list_that_is_wrong_for_all_leaves_the_group_usable(way):
    def job(c):
        for numels, one in (((2, 2, 2), sized(1)), ((1, 1, 1), [np.ones(1)])):
            for op in ("all_gather", "reduce_scatter"):
                with pytest.raises(Error, match=f"{op}.*: (give both|convert one)"):
                    LISTS[op](c, *one, sized(*numels))
        works(c)

    run(3, job, **WAYS[way])


def test_buffers_say_what_they_are():
    class Lying(bytearray):
        dtype = "float64"

    def job(c):
        floats = (ctypes.c_float * 4)(1, 2, 3, 4)
        c.all_reduce(floats)
        assert list(floats) == [2, 4, 6, 8]
        for kind in (ctypes.c_int32, ctypes.c_uint8, ctypes.c_int64, ctypes.c_double):
            numbers = (kind * 3)(1, 2, 3)
            c.all_reduce(numbers)
            assert list(numbers) == [2, 4, 6]
        other = ">" if sys.byteorder == "little" else "<"
        swapped = ctypes.c_float.__ctype_be__ if other == ">" else ctypes.c_float.__ctype_le__
        with pytest.raises(Error, match="dtype"):
            c.all_reduce((swapped * 4)(1, 2, 3, 4))
        with pytest.raises(Error, match="items of 1 bytes"):
            c.all_reduce(Lying(32))
        works(c)

    run(2, job)
