"""Megatron-Core's DistributedDataParallel, compressed: what pycomm replaces, on fakes.

A fake has only what is replaced or read: flat buffers, their buckets, and the two methods of a
bucket group. `make trainers` does the same with the package.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.errors import Error
from tests.torch.harness import equal, heard, near_zero
from tests.torch.hooks.given_gradients import Net, by_torch, drawn, lost_in_all, mean
from tests.torch.pool import on_ranks


class BucketGroup:
    """As Megatron's: begins to reduce its buckets, and waits for them."""

    def __init__(self, buckets: list[SimpleNamespace], config: SimpleNamespace) -> None:
        self.buckets, self.ddp_config = buckets, config
        self.is_first_batch, self.grad_reduce_handle = False, None
        self.exact, self.checked = 0, 0

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self.exact += 1
        for bucket in self.buckets:
            bucket.grad_data *= bucket.gradient_scaling_factor
            dist.all_reduce(bucket.grad_data)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self.start_grad_sync()

    def check_grads(self, **_: bool) -> None:
        self.checked += 1


class DistributedDataParallel(nn.Module):
    """As Megatron's: parameters have main_grad, a view into a buffer."""

    def __init__(
        self, padding: int = 0, factor: float = 0.5, alone: bool = False, **config: object
    ) -> None:
        super().__init__()
        self.module = Net()
        self.ddp_config = SimpleNamespace(
            num_distributed_optimizer_instances=1,
            check_for_nan_in_grad=False,
            check_for_large_grads=False,
            overlap_grad_reduce=True,
            average_in_collective=False,
        )
        vars(self.ddp_config).update(config)
        self.intra_dp_cp_group = dist.group.WORLD
        self.expert_parallel_bucket_groups: list[SimpleNamespace] = []
        weights = list(self.module.weights)
        self.bucket_groups = [
            BucketGroup([bucket(part, padding, factor)], self.ddp_config)
            for part in ([[each] for each in weights] if alone else (weights[:1], weights[1:]))
        ]

    def backward(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Write the gradients, and reduce them as Megatron does; return what there is then."""
        for weight, gradient in zip(self.module.weights, gradients, strict=True):
            weight.main_grad.copy_(gradient)
        for group in reversed(self.bucket_groups):
            group.start_grad_sync()
        for group in self.bucket_groups:
            group.finish_grad_sync()
        return [weight.main_grad.clone() for weight in self.module.weights]


DistributedDataParallel.__module__ = "megatron.core.distributed.distributed_data_parallel"


def bucket(weights: list[nn.Parameter], padding: int, factor: float) -> SimpleNamespace:
    data = torch.full((sum(w.numel() + padding for w in weights),), 9.0)
    at = 0
    for weight in weights:
        weight.main_grad = data[at : at + weight.numel()].view(weight.shape)
        at += weight.numel() + padding
    return SimpleNamespace(params_list=weights, grad_data=data, gradient_scaling_factor=factor)


@on_ranks(2)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_buckets_have_the_bits_of_ddp(rank, ranks, codec, padding):
    # A bucket is cut among the owners, and what is coded together depends on where.
    model = DistributedDataParallel(padding, alone=codec != "fp32")
    pycomm.compress(model, codec)
    wanted = by_torch(rank, codec, 4)
    assert all(equal(model.backward(drawn(rank, step)), wanted[step]) for step in range(4))
    assert not any(group.exact for group in model.bucket_groups)
    if codec == "int4":  # else nothing would be lost, and this would say nothing of residuals
        exact = DistributedDataParallel(padding).backward(drawn(rank, 0))
        assert not equal(wanted[0], exact)
    if padding:
        flat = model.bucket_groups[0].buckets[0].grad_data
        assert torch.equal(flat[-padding:], torch.full((padding,), 9.0))


@on_ranks(2)
def test_sums_and_averages_follow_megatrons_config(rank, ranks):
    for factor, averages, wanted in ((0.5, False, 0.5), (1.0, False, 1.0), (1.0, True, 0.5)):
        model = DistributedDataParallel(factor=factor, average_in_collective=averages)
        pycomm.compress(model, "fp32")
        found = model.backward(drawn(rank, 0))
        assert equal(found, [wanted * ranks * each for each in mean(0, ranks)])


@on_ranks(2)
def test_megatrons_call_order_is_followed(rank, ranks):
    model = DistributedDataParallel(check_for_nan_in_grad=True)
    pycomm.compress(model, "int4")
    model.backward(drawn(rank, 0))
    assert [group.checked for group in model.bucket_groups] == [1, 1]

    model = DistributedDataParallel(overlap_grad_reduce=False)
    pycomm.compress(model, "fp32")
    wanted = by_torch(rank, "fp32", 1)[0]
    for weight, gradient in zip(model.module.weights, drawn(rank, 0), strict=True):
        weight.main_grad.copy_(gradient)
    for group in model.bucket_groups:  # without overlap, waiting begins
        group.finish_grad_sync()
    assert equal([weight.main_grad for weight in model.module.weights], wanted)

    first = model.bucket_groups[0]
    first.start_grad_sync()
    first.start_grad_sync()  # the first batch of Megatron begins twice
    model.bucket_groups[1].start_grad_sync()
    for group in model.bucket_groups:
        group.finish_grad_sync()

    model = DistributedDataParallel()
    pycomm.compress(model, "fp32")
    with pytest.raises(Error, match=r"got no gradient.*overlap_grad_reduce=False"):
        model.bucket_groups[0].finish_grad_sync()
    model.bucket_groups[0].start_grad_sync()
    with pytest.raises(Error, match="reduced twice before they are waited for"):
        model.bucket_groups[0].start_grad_sync()
    model.bucket_groups[1].start_grad_sync()
    for group in model.bucket_groups:
        group.finish_grad_sync()


@on_ranks(2)
def test_unsupported_models_are_refused(rank, ranks):
    with pytest.raises(ValueError, match="num_distributed_optimizer_instances=2"):
        pycomm.compress(DistributedDataParallel(num_distributed_optimizer_instances=2), "int4")
    model = DistributedDataParallel()
    pycomm.compress(model, "int4")
    with pytest.raises(Error, match="compressed already"):
        pycomm.compress(model, "int8")
    model = DistributedDataParallel()
    for group in model.bucket_groups:
        group.finish_grad_sync = None
    with pytest.raises(Error, match="BucketGroup has no finish_grad_sync"):
        pycomm.compress(model, "int4")


@on_ranks(2)
def test_experts_that_travel_exactly_are_named_once(rank, ranks):
    with heard() as said:
        model = DistributedDataParallel()
        (*_, last) = model.module.weights
        group = model.bucket_groups.pop()
        model.expert_parallel_bucket_groups = [SimpleNamespace(params=[last])]
        pycomm.compress(model, "int4")
        model.bucket_groups.append(group)
    found = [text for text in said if "experts" in text]
    assert len(found) == (rank == 0)
    assert all("1 parameters of experts, from weights.2 on" in text for text in found)


@on_ranks(2)
def test_an_exact_codec_sends_what_is_owed(rank, ranks):
    model = DistributedDataParallel()
    state = pycomm.compress(model, "int4")
    assert pycomm.state_of(model) is state
    near_zero(*lost_in_all(model.backward, state, rank, ranks))
    assert not any(group.exact for group in model.bucket_groups)
