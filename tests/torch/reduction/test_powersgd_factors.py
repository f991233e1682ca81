"""PowerSGD over real groups: exact where possible, equal on all ranks, and without loss."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.feedback import Feedback, Residuals
from pycomm.policy import Policy
from pycomm.reduction.powersgd import Exchanges
from tests.extent import each_value
from tests.torch import harness
from tests.torch.harness import Chosen, all_equal, bucket_of, lost, near_zero, owed, reduced
from tests.torch.pool import on_ranks

SHAPES = {"a": (64, 96), "bias": (50,), "b": (30, 8, 10), "c": (128, 40), "small": (4, 4)}
MATRICES = ("a", "b", "c")


def model(spec: str) -> tuple[DistributedDataParallel, pycomm.CompressionState]:
    """Return a model in several buckets, which stay as they are."""
    made = DistributedDataParallel(Chosen(SHAPES), bucket_cap_mb=0.02, find_unused_parameters=True)
    return made, pycomm.compress(made, Policy(spec, guard=None))


gradients = partial(harness.gradients, shapes=SHAPES)
mean = partial(harness.mean, shapes=SHAPES)


def of_low_rank(rank: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return gradients whose mean over two ranks has rank 3, and the vectors of any."""
    made = {}
    for name, apart in gradients(0, 0).items():
        generator = torch.Generator().manual_seed(len(made))
        rows, columns = SHAPES[name][0], apart.numel() // SHAPES[name][0]
        left, right = (torch.randn(n, 3, generator=generator) for n in (rows, columns))
        mean = (left @ right.T).view(SHAPES[name]) if len(SHAPES[name]) > 1 else 0 * apart
        made[name] = scale * (mean + (1 - 2 * rank) * apart)
    return made


def forgive(state: pycomm.CompressionState) -> None:
    """Let a rank owe nothing."""
    state.settle()
    for name in MATRICES if state.step else ():
        for side in state.residuals[name].worker:
            side.zero_()


@on_ranks(2)
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_a_mean_of_that_rank_is_exact(rank, size, scale):
    """The scale of Q is that of the gradients; times them it would leave the range of float32."""
    net, state = model("powersgd:rank=3")
    given = [of_low_rank(r, scale) for r in range(size)]
    want = {name: sum(one[name] for one in given) / size for name in SHAPES}
    for _ in range(3):
        forgive(state)
        for name, got in reduced(net, of_low_rank(rank, scale)).items():
            # The factors of the mean are sums of up to 96 products in float32.
            torch.testing.assert_close(got / scale, want[name] / scale, rtol=1e-4, atol=1e-4)
    assert state.overflows == 0


@on_ranks(then=all_equal)
@each_value
@pytest.mark.parametrize(("backend", "ranks"), [("pycomm", 2), ("gloo", 2), ("gloo", 3)])
def test_feedback_loses_nothing_and_ranks_agree(rank, size):
    net, state = model("powersgd:2")
    missing, left = lost(net, rank, range(6), shapes=SHAPES), owed(state, SHAPES)
    for name in SHAPES:
        want = sum(mean(size, step)[name] for step in range(6))
        assert (left[name].norm() > 0.1 * want.norm()) == (name in MATRICES)
        # The tolerance is the round-off of a few dozen float32 operations on values around 3.
        near_zero(missing[name] - left[name], atol=1e-4)
    return missing


@on_ranks(2)
def test_power_iteration_goes_on_from_step_to_step(rank, size):
    """The error of a constant mean, without what is owed, falls with the steps."""
    net, state = model("powersgd:4")
    want, errors = mean(size, 0), []
    for _ in range(4):
        got = reduced(net, gradients(rank, 0))
        errors.append(sum(float((got[name] - want[name]).norm()) for name in MATRICES))
        forgive(state)
    assert errors[-1] < 0.98 * errors[0]


@on_ranks(2)
def test_an_exact_piece_sends_its_residual_once(rank, size):
    residuals, exchanges = Residuals(Feedback(storage="float32"), size), Exchanges(dist.group.WORLD)
    residual = residuals.get("p0", 4, torch.device("cpu"))
    piece = bucket_of("fp32", [4], residuals).pieces[0]
    assert piece.residual is residual
    residual.worker[residual.side].fill_(2.0)
    residual.worker[1 - residual.side].fill_(5.0)  # of the step before
    for want in (3.0, 1.0):
        values = torch.ones(4)
        exchanges.start(values, [piece], lambda: None, seed=3)
        exchanges.finish()
        residuals.commit(["p0"])
        assert values.tolist() == [want] * 4
