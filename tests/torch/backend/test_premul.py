"""PREMUL_SUM of torch.distributed: each rank's factor scales its own tensor, as in NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pycomm.policy import Policy
from tests.extent import each_value
from tests.torch.backend.test_ops import RANKS, same, values, wide
from tests.torch.fsdp.test_compress import chosen, gradients, reduced
from tests.torch.pool import on_ranks

CPU = torch.device("cpu")


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
            same(out, want[rank])
            same(x, inputs[rank])

            parts, out = list(inputs[rank].clone()), torch.zeros(numel, dtype=dtype)
            dist.reduce_scatter(out, parts, op=op)
            same(out, want[rank])
            same(torch.stack(parts), inputs[rank])

            whole, rows = inputs[rank].clone(), list(inputs[rank].clone())
            with dist._coalescing_manager(device=CPU):
                for tensor in (whole, *rows):
                    dist.all_reduce(tensor, op=op)
            same(whole, want)
            same(torch.stack(rows), want)

            x, outs = inputs[rank].clone(), [torch.zeros(numel, dtype=dtype) for _ in range(2)]
            with dist._coalescing_manager(device=CPU):
                for out in outs:
                    dist.reduce_scatter_tensor(out, x, op=op)
            for out in outs:
                same(out, want[rank])
            same(x, inputs[rank])


@on_ranks(2)
def test_gradients_with_codecs_have_factors_of_their_own(rank, size):
    """FSDP2 divides gradients by PREMUL_SUM, including those that go through a codec."""
    model, state = chosen(size, Policy("fp32", ()), "fsdp")
    factors = [8.0, 5.0]  # for the number of ranks torch uses AVG
    model.set_gradient_divide_factor(factors[rank])
    got = reduced(model, gradients(rank, 0))["big"]
    assert state.step == 1  # the gradients have gone through the codec
    want = sum(gradients(r, 0)["big"] / factors[r] for r in range(size))
    torch.testing.assert_close(got, want)  # sums of two float32, with codecs in another order
