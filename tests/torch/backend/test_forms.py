"""All forms of c10d's operations: equal to Gloo's on integers, and those that Gloo lacks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch.pool import on_ranks

Tensors = list[torch.Tensor]
Form = Callable[[dist.ProcessGroup, int, int], Tensors]
CPU = torch.device("cpu")


def integers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return integers from 1 to 3 that differ by rank."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * 7 + rank * 5) % 3 + 1).to(dtype).reshape(shape)


def sparse(rank: int, size: int) -> torch.Tensor:
    """Return a (10, 3) tensor with rows that occur twice or on several ranks; empty on the last."""
    rows = [0, rank + 1, rank + 1, 9] if rank < size - 1 else []
    values = integers(rank, len(rows), 3)
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.long), values, (10, 3))


# ------------------------------------------------------------------ forms that Gloo has too


def all_reduces(group: dist.ProcessGroup, rank: int, size: int) -> Tensors:
    out = []
    ops = dist.ReduceOp
    for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
            out.append(integers(rank, 1001, dtype=dtype))
            dist.all_reduce(out[-1], op=op, group=group)
    for op in (ops.BAND, ops.BOR, ops.BXOR):
        out.append(integers(rank, 1001, dtype=torch.int64))
        dist.all_reduce(out[-1], op=op, group=group)
    return out


def sparse_all_reduce(group: dist.ProcessGroup, rank: int, size: int) -> Tensors:
    x = sparse(rank, size)
    dist.all_reduce(x, group=group)
    return [x.coalesce().indices(), x.coalesce().values()]


def coalesced(group: dist.ProcessGroup, rank: int, size: int) -> Tensors:
    shapes = [(3,), (2, 5), (0,), (100,)]
    x = [integers(rank, *s) for s in shapes]
    dist.all_reduce_coalesced(x, group=group)
    gathered = [[torch.zeros(s) for s in shapes] for _ in range(size)]
    dist.all_gather_coalesced(gathered, [integers(rank, *s) for s in shapes], group=group)
    outs = [torch.zeros(size * 4), torch.zeros(size * 6, 2)]
    parts = [torch.zeros(4), torch.zeros(6, 2)]
    with dist._coalescing_manager(group):
        for out, part in zip(outs, parts, strict=True):
            dist.all_gather_into_tensor(out, integers(rank, *part.shape), group=group)
    with dist._coalescing_manager(group):
        for out, part in zip(outs, parts, strict=True):
            dist.reduce_scatter_tensor(part, integers(rank, *out.shape), group=group)
    return [*x, *(t for of_rank in gathered for t in of_rank), *outs, *parts]


def rooted(group: dist.ProcessGroup, rank: int, size: int) -> Tensors:
    out = []
    for root in range(size):
        x, y, part = integers(rank, 50), integers(rank, 50), torch.zeros(7)
        dist.broadcast(x, root, group=group)
        dist.reduce(y, root, group=group)
        lists = [torch.zeros(7) for _ in range(size)] if rank == root else None
        dist.gather(integers(rank, 7), lists, dst=root, group=group)
        whole = [integers(r, 7) for r in range(size)] if rank == root else None
        dist.scatter(part, whole, src=root, group=group)
        out += [x, part, *(lists or []), *([y] if rank == root else [])]
    return out


def lists(group: dist.ProcessGroup, rank: int, size: int) -> Tensors:
    gathered = [torch.zeros(3, 4) for _ in range(size)]
    dist.all_gather(gathered, integers(rank, 4, 3).t(), group=group)
    scattered = torch.zeros(rank + 1)  # uneven
    dist.reduce_scatter(scattered, [integers(rank + r, r + 1) for r in range(size)], group=group)
    exchanged = [torch.zeros(5) for _ in range(size)]
    dist.all_to_all(exchanged, [integers(rank + r, 5) for r in range(size)], group=group)
    return [*gathered, scattered, *exchanged]


def singles(group: dist.ProcessGroup, rank: int, size: int) -> Tensors:
    gathered, scattered = torch.zeros(size * 3, 2), torch.zeros(3, 2)
    dist.all_gather_into_tensor(gathered, integers(rank, 3, 2), group=group)
    dist.reduce_scatter_tensor(scattered, integers(rank, size * 3, 2), group=group)
    even = torch.zeros(size * 2, 2)
    dist.all_to_all_single(even, integers(rank, size * 2, 2), group=group)
    sends, receives = [rank + r for r in range(size)], [r + rank for r in range(size)]
    uneven = torch.zeros(sum(receives), 2)
    dist.all_to_all_single(uneven, integers(rank, sum(sends), 2), receives, sends, group=group)
    return [gathered, scattered, even, uneven]


def point_to_point(group: dist.ProcessGroup, rank: int, size: int) -> Tensors:
    right, left = (rank + 1) % size, (rank - 1) % size
    x, y = torch.zeros(1000), torch.zeros(3)
    sending = dist.isend(integers(rank, 1000), right, group=group)
    dist.recv(x, left, group=group)
    sending.wait()
    ops = [
        dist.P2POp(dist.irecv, y, left, group=group),
        dist.P2POp(dist.isend, integers(rank, 3), right, group=group),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    return [x, y]


FORMS: list[Form] = [
    all_reduces,
    sparse_all_reduce,
    coalesced,
    rooted,
    lists,
    singles,
    point_to_point,
]


@on_ranks()
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_form_of_gloo_gives_the_same(rank, size):
    gloo = dist.new_group(backend="gloo")
    for form in FORMS:
        ours, theirs = form(dist.group.WORLD, rank, size), form(gloo, rank, size)
        assert len(ours) == len(theirs)
        for i, (got, want) in enumerate(zip(ours, theirs, strict=True)):
            assert got.dtype == want.dtype
            assert torch.equal(got, want), f"{form.__name__}, tensor {i}: {got} is not {want}"


# ------------------------------------------------------------------ forms that Gloo lacks


@on_ranks()
@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_gather_and_scatter(rank, size):
    for root in range(size):
        parts = [torch.zeros(r, 2) for r in range(size)] if rank == root else None
        dist.gather(integers(rank, rank, 2), parts, dst=root)
        for r, part in enumerate(parts or []):
            assert torch.equal(part, integers(r, r, 2))
        out = torch.zeros(rank, 2)
        whole = [integers(r, r, 2) for r in range(size)] if rank == root else None
        dist.scatter(out, whole, src=root)
        assert torch.equal(out, integers(rank, rank, 2))


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


@on_ranks(2)
def test_ddp_trains_a_sparse_embedding_as_with_gloo(rank, size):
    gloo = dist.new_group(backend="gloo")
    results = []
    for group in (dist.group.WORLD, gloo):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1))
        ddp = DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            ddp(torch.tensor([rank, step, 7 * rank + 3])).sum().backward()
            assert model[0].weight.grad.is_sparse
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    for got, want in zip(*results, strict=True):
        # With two ranks a sum of floats has the same bits in either order.
        assert torch.equal(got, want)


@on_ranks()
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_batches_of_sends_and_receives_are_one_work(rank, size):
    big = 1 << 18  # more than channels hold
    for order in (1, -1):
        received = [torch.zeros(big) for _ in range(size)]
        ops = [dist.P2POp(dist.irecv, received[r], r) for r in range(size)]
        ops += [dist.P2POp(dist.isend, integers(rank + r, big), r) for r in range(size)]
        works = dist.batch_isend_irecv(ops[::order])
        assert len(works) == 1  # one for all peers, including this rank
        works[0].wait(timedelta(seconds=20))
        assert works[0].is_completed()
        assert works[0].is_success()
        assert len(works[0].result()) == 2 * size
        for r, x in enumerate(received):
            assert torch.equal(x, integers(r + rank, big))

    # The order of two messages to one peer is kept.
    left, right = (rank - 1) % size, (rank + 1) % size
    first, second = torch.zeros(2), torch.zeros(3)
    ops = [
        dist.P2POp(dist.isend, integers(rank, 2), right),
        dist.P2POp(dist.irecv, first, left),
        dist.P2POp(dist.isend, integers(rank + 1, 3), right),
        dist.P2POp(dist.irecv, second, left),
    ]
    (work,) = dist.batch_isend_irecv(ops)
    assert len(work.get_future().wait()) == 4
    assert torch.equal(first, integers(left, 2))
    assert torch.equal(second, integers(left + 1, 3))


@on_ranks()
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_coalescing_block_is_one_work(rank, size):
    """One block has collectives, sends and receives, posted in a different order on each rank."""
    left, right = (rank - 1) % size, (rank + 1) % size
    x, y, z = integers(rank, 1000), integers(rank, 10), torch.zeros(1 << 16)
    pieces = [
        lambda: dist.isend(integers(rank, 1 << 16), right),
        lambda: dist.irecv(z, left),
        lambda: (dist.broadcast(x, 1, async_op=True), dist.broadcast(y, 0, async_op=True)),
    ]
    with dist._coalescing_manager(device=CPU, async_ops=True) as block:
        for piece in pieces[rank % 3 :] + pieces[: rank % 3]:
            piece()
    (work,) = block.works
    work.wait()
    assert torch.equal(x, integers(1, 1000))
    assert torch.equal(y, integers(0, 10))
    assert torch.equal(z, integers(left, 1 << 16))

    sums = [integers(rank, 5), integers(rank, 7)]
    with dist._coalescing_manager(device=CPU):
        for t in sums:
            dist.all_reduce(t)
    for t in sums:
        assert torch.equal(t, sum(integers(r, t.numel()) for r in range(size)))

    with dist._coalescing_manager(device=CPU, async_ops=True) as block:
        pass
    assert block.works == []
