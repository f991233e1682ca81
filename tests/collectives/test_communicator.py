"""The Python Communicator: the arrays that it accepts, and its description of itself."""

from __future__ import annotations

import array as arrays
import gc

import numpy as np
import pytest
import torch

from pycomm.communicator import Communicator, Store
from pycomm.env import env
from pycomm.errors import Error
from tests.ranks import run


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


def test_items_that_are_no_numbers_are_refused():
    with (
        Communicator(None, 0, 1) as c,
        pytest.raises(Error, match="cannot tell the dtype of array"),
    ):
        c.all_reduce(arrays.array("u", "text"))


def test_tensors_that_cannot_be_used_are_refused():
    with Communicator(None, 0, 1) as c:
        with pytest.raises(Error, match="not contiguous"):
            c.all_reduce(torch.ones(4, 4).t())
        with pytest.raises(Error, match="not contiguous"):
            c.all_reduce(torch.ones(4, dtype=torch.complex64).conj())
        with pytest.raises(Error, match="not contiguous"):
            c.all_reduce(torch._neg_view(torch.ones(4)))  # such as the imaginary part of conj()
        with pytest.raises(Error, match="on meta; move it"):
            c.all_reduce(torch.ones(4, device="meta"))
        with pytest.raises(Error, match=r"dtype torch\.complex32 is not known"):
            c.all_reduce(torch.ones(3, dtype=torch.complex32))
        read_only = np.ones(3)
        read_only.flags.writeable = False
        with pytest.raises(Error, match="read-only"):
            c.all_reduce(read_only)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "smoke"}, 'unknown transport "smoke"; use one of auto, shm, tcp, local'),
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


def test_a_group_says_how_it_talks_and_counts_its_bytes():
    def job(c):
        def sent() -> tuple[int, int]:
            before = c.wire_bytes(), c.sent_bytes()
            c.all_reduce(np.ones(1000, np.float32))
            return c.wire_bytes() - before[0], c.sent_bytes() - before[1]

        # Further sockets of a lane do their handshake while the first is in use already.
        return c.describe(), repr(c), *min(sent() for _ in range(10))

    text, shown, wire, sent = run(2, job)[0]
    assert text.startswith("2 ranks: local with 1")
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


def test_groups_of_one_store_do_not_mix():
    store = Store.local()

    def job(c):
        with Communicator(store, c.rank, 2, group="b", transport="local", timeout=10) as other:
            x, y = np.ones(3), np.full(3, 5.0)
            c.all_reduce(x)
            other.all_reduce(y)
            return x[0], y[0]

    assert run(2, job) == [(2, 10)] * 2
