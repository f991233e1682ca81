"""What each rank has sent of the momentum, from which it goes on."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.distributed as dist

from tests.torch.harness import SHAPES
from tests.torch.optim.test_coded_adamw import make, train


def means_of_sent(rank: int, size: int) -> None:
    """The mean of what ranks have sent is the momentum, also where the bucket is another one, as
    after the first step of DDP and after a checkpoint."""
    for codec in ("sign", "topk:0.02", "int4"):
        model, optimizer = make(codec, feedback="residual:storage=float32")
        for step in range(4):
            for name in ("big", "small") if step in (1, 2) else ():
                optimizer.compression.residuals[name].layouts = ["another", "another"]
            train(model, optimizer, rank, range(step, step + 1))
            own = optimizer.compression.own
            for name in ("big", "small"):
                mean = own[name].current("worker")
                dist.all_reduce(mean)
                momentum = optimizer.state[getattr(model.module, name)]["exp_avg"].reshape(-1)
                if codec != "int4":  # whose owner codes the mean once more
                    # Round-off of sums and of the residual that is taken out again.
                    torch.testing.assert_close(mean / size, momentum, rtol=1e-4, atol=1e-6)
                assert float((mean / size - momentum).norm() / momentum.norm()) < 0.3


def test_momentum_is_the_mean_of_what_ranks_have_sent(pool):
    pool.run(means_of_sent, ranks=3)


def begins_from_momentum(rank: int, size: int) -> None:
    """After a state without what was sent, such as that of torch's AdamW, ranks go on from m."""
    (a, one), (b, two) = make("topk:1.0"), make("topk:1.0")
    train(a, one, rank, range(3))
    b.load_state_dict(a.state_dict())
    two.load_state_dict(deepcopy(one.state_dict()))
    before = two.state[b.module.big]["exp_avg"].clone()
    moment = two.compression.moments["big"]
    b({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
    # Round-off of a division and a multiplication.
    torch.testing.assert_close(b.module.big.grad, moment.beta * before, rtol=1e-5, atol=1e-7)
    two.zero_grad()
    b({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
    torch.testing.assert_close(b.module.big.grad, moment.beta * before, rtol=1e-5, atol=1e-7)


def test_without_what_was_sent_ranks_go_on_from_the_momentum(pool):
    pool.run(begins_from_momentum)
