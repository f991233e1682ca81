"""Every operation of torch.distributed on the "pycomm" backend, against plain torch.

Values are small integers in every dtype, so results must be equal. Operations that plain torch does
not have, on sparse tensors, are compared with Gloo's.
"""

from __future__ import annotations

import copy
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import _C, backend
from tests.extent import each_value
from tests.torch.harness import on_both
from tests.torch.pool import on_ranks

FLOATS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = [getattr(torch, f"{kind}{n}") for kind in ("int", "uint") for n in (8, 16, 32, 64)]
CPU = torch.device("cpu")
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]
SHAPES = [(1,), (7,), (3, 5), (1000,), (65537,), (0,), ()]
RANKS = [2, 3]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return integers from 1 to 3 (bool: 0 and 1) that differ by rank."""
    numel = torch.Size(shape).numel()
    x = (torch.arange(numel) * 7 + rank * 5 + torch.arange(numel) // 11) % 3 + 1
    return (x > 1 if dtype == torch.bool else x.to(torch.float32).to(dtype)).reshape(shape)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype in which torch can compare and reduce."""
    return x if x.is_complex() else x.to(torch.float64)


def same(got: Any, want: Any) -> None:
    """Check a tensor, or each of several."""
    if isinstance(got, torch.Tensor):
        assert got.shape == want.shape
        assert torch.equal(wide(got), wide(want)), f"{got} is not {want}"
        return
    for one, of in zip(got, want, strict=True):
        same(one, of)


def reduced(op: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the core's reduction, which tests/core/test_reduce.py compares with plain torch's."""
    out = torch.empty_like(inputs[0])
    dtype = str(out.dtype).removeprefix("torch.").removesuffix("fn")
    name = {"PRODUCT": "prod"}.get(op.name, op.name.lower())
    how = _C.DType.__members__[dtype], _C.ReduceOp.__members__[name]
    _C.reduce(*how, [x.data_ptr() for x in inputs], out.data_ptr(), out.numel())
    return out


def ops_for(dtype: torch.dtype) -> list[dist.ReduceOp]:
    op = dist.ReduceOp
    if dtype.is_complex:
        return [op.SUM, op.AVG]
    ops = [op.SUM, op.PRODUCT, op.MIN, op.MAX]
    if dtype in INTEGERS:
        return [*ops, op.AVG, op.BAND, op.BOR, op.BXOR]
    return ops if dtype == torch.bool else [*ops, op.AVG]


@on_ranks()
@each_value
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(rank, size, dtype):
    for shape in SHAPES:
        inputs = [values(r, shape, dtype) for r in range(size)]
        for op in ops_for(dtype):
            x = inputs[rank].clone()
            dist.all_reduce(x, op=op)
            same(x, reduced(op, inputs))


@on_ranks()
@each_value
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e8m0fnu], ids=str)
def test_broadcast_gather_scatter_all_gather(rank, size, dtype):
    for shape in SHAPES:
        theirs = [values(r, shape, dtype) for r in range(size)]
        mine = theirs[rank]
        for root in range(size):
            x = mine.clone()
            dist.broadcast(x, root)
            same(x, theirs[root])

            gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
            dist.gather(mine, gathered, dst=root)
            same(gathered or [], theirs if rank == root else [])

            x = torch.empty_like(mine)
            dist.scatter(x, theirs if rank == root else None, src=root)
            same(x, mine)

        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine)
        same(gathered, theirs)


@on_ranks()
@pytest.mark.parametrize("ranks", RANKS)
def test_all_gather_reduce_scatter_all_to_all_of_one_tensor(rank, size):
    for n in (1, 5, 4099, 0):
        theirs = [values(r, (n, 2)) for r in range(size)]
        out = torch.empty(size * n, 2)
        dist.all_gather_into_tensor(out, theirs[rank])
        same(out, torch.cat(theirs))

        whole = [values(r, (size * n, 2)) for r in range(size)]
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            out = torch.empty(n, 2)
            dist.reduce_scatter_tensor(out, whole[rank], op=op)
            same(out, reduced(op, whole)[rank * n : (rank + 1) * n])

        parts = [list(w.chunk(size)) if n else [w] * size for w in whole]
        out = torch.empty(n, 2)
        dist.reduce_scatter(out, parts[rank])
        same(out, sum(p[rank] for p in parts))

        out = torch.empty(size * n, 2)
        dist.all_to_all_single(out, whole[rank])
        same(out, torch.cat([w.reshape(size, n, 2)[rank] for w in whole]))


@on_ranks()
@pytest.mark.parametrize("ranks", RANKS)
def test_uneven_lists(rank, size):
    # rank r sends r + s + 1 rows to rank s
    def rows(source: int, target: int) -> torch.Tensor:
        return values(source * size + target, (source + target + 1, 3))

    sent = [rows(rank, s) for s in range(size)]
    expected = [rows(s, rank) for s in range(size)]
    out = torch.empty(sum(len(e) for e in expected), 3)
    dist.all_to_all_single(out, torch.cat(sent), [len(e) for e in expected], [len(s) for s in sent])
    same(out, torch.cat(expected))

    received = [torch.empty_like(e) for e in expected]
    dist.all_to_all(received, sent)
    same(received, expected)

    theirs = [values(r, (r, 3)) for r in range(size)]  # none on the first rank
    gathered = [torch.empty(r, 3) for r in range(size)]
    dist.all_gather(gathered, theirs[rank])
    same(gathered, theirs)

    for root in range(size):
        gathered = [torch.zeros(r, 3) for r in range(size)] if rank == root else None
        dist.gather(theirs[rank], gathered, dst=root)
        same(gathered or [], theirs if rank == root else [])
        out = torch.zeros(rank, 3)
        dist.scatter(out, theirs if rank == root else None, src=root)
        same(out, theirs[rank])

    inputs = [[values(r + s, (s + 1, 3)) for s in range(size)] for r in range(size)]
    out = torch.empty(rank + 1, 3)
    dist.reduce_scatter(out, inputs[rank])
    same(out, sum(i[rank] for i in inputs))


@on_ranks()
@pytest.mark.parametrize("ranks", RANKS)
def test_coalesced(rank, size):
    shapes = [(3,), (2, 2), (0,), (100,)]
    xs = [values(rank, s) for s in shapes]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    sums = [sum(values(r, s) for r in range(size)) for s in shapes]
    same(xs, sums)

    xs = [values(rank, s) for s in shapes]
    everybody = [[torch.zeros(s) for s in shapes] for _ in range(size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these functions are deprecated
        dist.all_reduce_coalesced(xs)
        dist.all_gather_coalesced(everybody, [values(rank, s) for s in shapes])
    same(xs, sums)
    same(everybody, [[values(r, s) for s in shapes] for r in range(size)])

    outs = [torch.empty(size * 4), torch.empty(size * 6, 2)]
    ins = [values(rank, (4,)), values(rank, (6, 2))]
    with dist._coalescing_manager():
        for out, x in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, x)
    same(outs[1], torch.cat([values(r, (6, 2)) for r in range(size)]))

    out = [torch.empty(4), torch.empty(6, 2)]
    whole = [values(rank, (size * 4,)), values(rank, (size * 6, 2))]
    with dist._coalescing_manager():
        for o, x in zip(out, whole, strict=True):
            dist.reduce_scatter_tensor(o, x)
    same(out[0], sum(values(r, (size * 4,)) for r in range(size))[rank * 4 : rank * 4 + 4])


@on_ranks(2)
def test_tensors_that_are_not_contiguous(rank, size):
    def strided(r: int) -> torch.Tensor:
        return values(r, (6, 10)).t()[::2]

    base = values(rank, (6, 10))
    untouched = base.t()[1::2].clone()
    dist.all_reduce(base.t()[::2])
    same(base.t()[::2], sum(strided(r) for r in range(size)))
    same(base.t()[1::2], untouched)

    base = values(rank, (6, 10))
    dist.broadcast(base.t()[::2], 1)
    same(base.t()[::2], strided(1))

    gathered = [torch.empty(10, 6).t().contiguous().t()[::2] for _ in range(size)]
    dist.all_gather(gathered, strided(rank))
    same(gathered, [strided(r) for r in range(size)])

    leaf = torch.nn.Parameter(values(rank, (4, 4)).t())
    dist.broadcast(leaf.data, 0)
    same(leaf.data, values(0, (4, 4)).t())
    weight = torch.nn.Parameter(values(rank, (2, 3, 4, 4)).to(memory_format=torch.channels_last))
    dist.all_reduce(weight.detach())
    same(weight.detach(), sum(values(r, (2, 3, 4, 4)) for r in range(size)))


@on_ranks(2)
def test_async_operations_run_and_complete_in_order(rank, size):
    order: list[int] = []
    tensors = [values(rank, (1 + 1000 * (i % 3),)) for i in range(30)]
    futures = []
    for i, x in enumerate(tensors):
        future = dist.all_reduce(x, async_op=True).get_future()
        futures.append(future.then(lambda f, i=i: order.append(i) or f.value()[0]))
    for future, x in zip(futures, tensors, strict=True):
        assert future.wait() is x
    assert order == list(range(30))

    # Three operations use one tensor, without a wait in between.
    x = torch.full((10,), float(rank + 1))
    works = [
        dist.all_reduce(x, async_op=True),
        dist.broadcast(x, 0, async_op=True),
        dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True),
    ]
    dist.barrier()  # runs here, after everything that was queued
    assert all(work.is_completed() and work.is_success() for work in works)
    same(x, torch.full((10,), float(sum(range(1, size + 1)))))

    # The tensor and the work have no other references.
    for _ in range(20):
        dist.all_reduce(torch.ones(10000), async_op=True)
    dist.barrier()


@on_ranks()
@pytest.mark.parametrize("ranks", RANKS)
def test_point_to_point(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for shape in SHAPES:
        got = torch.empty(shape)
        requests = [dist.isend(values(rank, shape), right), dist.irecv(got, left)]
        for request in requests:
            request.wait()
        same(got, values(left, shape))

    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            x = torch.empty(3)
            source = dist.recv(x)
            same(x, values(source, (3,)))
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(values(rank, (3,)), 0)

    # A posted receive does not block a collective.
    x = torch.empty(100000)
    receive = dist.irecv(x, left)
    dist.barrier()
    send = dist.isend(values(rank, (100000,)), right)
    dist.barrier()
    assert receive.get_future().wait()[0] is x
    send.wait()
    same(x, values(left, (100000,)))

    strided = torch.zeros(4, 6)
    ops = [
        dist.P2POp(dist.isend, values(rank, (6, 4)).t(), right),
        dist.P2POp(dist.irecv, strided.t(), left),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    same(strided.t(), values(left, (6, 4)).t().reshape(6, 4))


@on_ranks(2)
def test_group_tells_about_itself_and_shuts_down_twice(rank, size):
    group = dist.group.WORLD
    assert dist.get_backend() == "pycomm"
    native = backend.find()
    assert native.name() == "pycomm"
    assert (native.rank(), native.size()) == (rank, size)
    assert f"{size} ranks" in native.describe()
    assert copy.deepcopy(native.options).transport == native.options.transport
    native._set_sequence_number_for_group()
    before = native._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1000))
    assert native._get_sequence_number_for_group() == before + 1
    assert native.sent_bytes > 0
    assert native.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    group.shutdown()
    group.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        dist.all_reduce(torch.ones(1))


@on_ranks(2, backend=None)
def test_groups_one_after_another_in_the_same_store(rank, size, store):
    for round in range(12):  # a value of an earlier one is met by chance
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
        x = torch.tensor([float(round)])
        dist.all_reduce(x)
        assert x.item() == round * size
        dist.destroy_process_group()


# ------------------------------------------------------------------ uneven, sparse, batched


@on_both()
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sparse_all_reduce(rank, size):
    """Rows occur twice or on several ranks, and the last rank has none."""
    rows = [0, rank + 1, rank + 1, 9] if rank < size - 1 else []
    places = torch.tensor([rows], dtype=torch.long)
    x = torch.sparse_coo_tensor(places, values(rank, (len(rows), 3)), (10, 3))
    dist.all_reduce(x)
    return x.coalesce().indices(), x.coalesce().values()


@on_ranks(2)
def test_sparse_all_reduce_of_other_shapes(rank, size):
    # The tensor has two sparse dimensions, no dense one, and integers.
    x = torch.sparse_coo_tensor(torch.tensor([[rank, 4], [0, 4]]), torch.tensor([1, 2]), (5, 5))
    work = dist.all_reduce(x, async_op=True)
    assert work.get_future().wait()[0] is x
    want = torch.zeros(5, 5, dtype=torch.long)
    want[:size, 0], want[4, 4] = 1, 2 * size
    assert torch.equal(x.to_dense(), want)
    with pytest.raises(pycomm.WireMismatch, match=r"shape.* rank"):
        dist.all_reduce(torch.ones(3 + rank).to_sparse())
    dist.barrier()  # all ranks found the error alike: the group is still usable


@on_ranks()
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_batches_of_sends_and_receives_are_one_work(rank, size):
    big = 1 << 18  # more than channels hold
    for order in (1, -1):
        received = [torch.zeros(big) for _ in range(size)]
        ops = [dist.P2POp(dist.irecv, received[r], r) for r in range(size)]
        ops += [dist.P2POp(dist.isend, values(rank + r, (big,)), r) for r in range(size)]
        works = dist.batch_isend_irecv(ops[::order])
        assert len(works) == 1  # one for all peers, including this rank
        works[0].wait(timedelta(seconds=20))
        assert works[0].is_completed()
        assert works[0].is_success()
        assert len(works[0].result()) == 2 * size
        same(received, [values(r + rank, (big,)) for r in range(size)])

    # The order of two messages to one peer is kept.
    left, right = (rank - 1) % size, (rank + 1) % size
    first, second = torch.zeros(2), torch.zeros(3)
    ops = [
        dist.P2POp(dist.isend, values(rank, (2,)), right),
        dist.P2POp(dist.irecv, first, left),
        dist.P2POp(dist.isend, values(rank + 1, (3,)), right),
        dist.P2POp(dist.irecv, second, left),
    ]
    (work,) = dist.batch_isend_irecv(ops)
    work.wait()
    assert len(work.result()) == 4
    same([first, second], [values(left, (2,)), values(left + 1, (3,))])


@on_ranks()
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_coalescing_block_is_one_work(rank, size):
    """One block has collectives, sends and receives, posted in a different order on each rank."""
    left, right = (rank - 1) % size, (rank + 1) % size
    x, y, z = values(rank, (1000,)), values(rank, (10,)), torch.zeros(1 << 16)
    pieces = [
        lambda: dist.isend(values(rank, (1 << 16,)), right),
        lambda: dist.irecv(z, left),
        lambda: (dist.broadcast(x, 1, async_op=True), dist.broadcast(y, 0, async_op=True)),
    ]
    with dist._coalescing_manager(device=CPU, async_ops=True) as block:
        for piece in pieces[rank % 3 :] + pieces[: rank % 3]:
            piece()
    (work,) = block.works
    work.wait()
    same([x, y, z], [values(1, (1000,)), values(0, (10,)), values(left, (1 << 16,))])

    with dist._coalescing_manager(device=CPU, async_ops=True) as block:
        pass
    assert block.works == []


# ------------------------------------------------------------------ PREMUL_SUM
# Each rank's factor scales its own tensor, as in NCCL.


@on_ranks()
@each_value
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_each_rank_has_a_factor_of_its_own(rank, size, dtype):
    """Every reducing operation accepts factors that are numbers or tensors."""
    factors = [1.0, 3.0, 0.5][:size]
    for factor in (factors[rank], torch.tensor([factors[rank]]), torch.tensor(factors[rank])):
        op = dist._make_nccl_premul_sum(factor)
        for numel in (4, 1000, 200_000):
            inputs = [values(r, (size, numel), dtype) * 2 for r in range(size)]
            want = sum(wide(x) * f for x, f in zip(inputs, factors, strict=True)).to(dtype)

            x = inputs[rank].clone()
            dist.all_reduce(x, op=op)
            same(x, want)

            x = inputs[rank].clone()
            dist.reduce(x, size - 1, op=op)
            same(x, want if rank == size - 1 else inputs[rank])

            x, out = inputs[rank].clone(), torch.zeros(numel, dtype=dtype)
            dist.reduce_scatter_tensor(out, x, op=op)
            same([out, x], [want[rank], inputs[rank]])

            parts, out = list(inputs[rank].clone()), torch.zeros(numel, dtype=dtype)
            dist.reduce_scatter(out, parts, op=op)
            same([out, torch.stack(parts)], [want[rank], inputs[rank]])

            whole, rows = inputs[rank].clone(), list(inputs[rank].clone())
            with dist._coalescing_manager(device=CPU):
                for tensor in (whole, *rows):
                    dist.all_reduce(tensor, op=op)
            same([whole, torch.stack(rows)], [want, want])

            x, outs = inputs[rank].clone(), [torch.zeros(numel, dtype=dtype) for _ in range(2)]
            with dist._coalescing_manager(device=CPU):
                for out in outs:
                    dist.reduce_scatter_tensor(out, x, op=op)
            same([*outs, x], [want[rank], want[rank], inputs[rank]])
