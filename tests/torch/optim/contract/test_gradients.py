"""Which gradients count in a step, and what of them does not: accumulation, overflows, clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error
from tests.torch import harness
from tests.torch.harness import Chosen, all_equal, equal, values, whole
from tests.torch.optim.table import (
    MOMENTUM,
    ROWS,
    SHAPES,
    assert_alike,
    coded,
    gradients,
    in_ddp,
    integers,
    make,
    net,
    plain,
    rows,
    step,
    train,
    without_reduction,
    wrap,
)
from tests.torch.pool import on_ranks

LOCAL = ("local", 2)


@on_ranks(then=all_equal)
@rows(LOCAL)
def test_the_exact_codec_has_the_bits_of_torch(rank, size, which):
    """With two groups, a schedule and clipping."""
    found = []
    for is_coded in (True, False):
        model = wrap(which, net())
        big, *others = model.parameters()
        groups = [{"params": [big]}, {"params": others, "lr": 0.05, "weight_decay": 0.0}]
        if which == "local":  # of which an outer step of one rank is the same, but for rounding
            group = dist.new_group([rank], use_local_synchronization=True)
            optimizer = plain(which, groups)
            if is_coded:
                local = pycomm.LocalSGD(
                    *(model,), every=1, codec="fp32", lr=1.0, momentum=0.0, process_group=group
                )
                optimizer.register_step_post_hook(lambda *_, local=local: local.step())
        else:
            make_one = coded if is_coded else lambda w, _, p, codec: plain(w, p)
            optimizer = make_one(which, model, groups, codec="fp32")
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.75)
        for number in range(6):
            optimizer.zero_grad()
            model(gradients(0 if which == "local" else rank, number)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        found.append(values(model))
    if which == "local":
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
    else:
        assert equal(*found)
    return found[1]


# ---------------------------------------------------------------- which gradients count


@on_ranks()
@rows()
def test_gradients_add_up_until_a_step_uses_them(rank, size, which):
    (a, one), (b, two) = make(which), make(which)
    for number in range(4):
        first, second = integers(rank, number), integers(rank, number + 50)
        step(a, one, {name: first[name] + second[name] for name in first})
        two.zero_grad()
        without_reduction(b, first)
        b(second).backward()
        two.step()
    assert equal(values(a), values(b))
    assert_alike(one, two)


@on_ranks()
@rows()
def test_a_second_backward_before_a_step_is_refused(rank, size, which):
    model, optimizer = make(which)
    train(model, optimizer, rank, range(2))
    optimizer.zero_grad()
    model(gradients(rank, 2)).backward()
    with pytest.raises(Error, match=r"accumulate in no_sync\(\)"):
        model(gradients(rank, 3)).backward()


@on_ranks(2)
def test_a_second_backward_after_a_discarded_one_is_refused(rank, size):
    """The first bucket, which begins a step, has an exact parameter alone."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    exact = pycomm.Policy("sign", rules=(pycomm.Rule(codec="fp32", name="1.weight"),))
    optimizer = pycomm.CodedAdamW(model.parameters(), model=model, codec=exact)
    for number in range(4):  # DDP has rebuilt its buckets
        optimizer.zero_grad()
        model(torch.full((1, 64), 1.0 + rank + number)).sum().backward()
        if number < 2:
            optimizer.step()
    with pytest.raises(Error, match=r"accumulate in no_sync\(\)"):
        model(torch.ones(1, 64)).sum().backward()


@on_ranks()
@rows()
@pytest.mark.parametrize("to_none", [True, False])
def test_discarded_gradients_leave_nothing(rank, size, which, to_none):
    (a, one), (b, two) = make(which), make(which)
    for number in range(4):
        step(a, one, gradients(rank, number))
        two.zero_grad(set_to_none=to_none)
        b(gradients(rank, number + 50)).backward()
        two.zero_grad(set_to_none=to_none)
        b(gradients(rank, number)).backward()
        two.step()
    assert equal(values(a), values(b))
    assert_alike(one, two)


@on_ranks()
@rows(LOCAL)
def test_a_closure_may_do_the_backward_in_the_step(rank, size, which):
    (a, one), (b, two) = make(which), make(which)
    losses = []
    for number in range(3):
        given = gradients(rank, number)
        step(a, one, given)

        def backward(given: dict[str, torch.Tensor] = given) -> torch.Tensor:
            two.zero_grad()
            loss = b(given)
            loss.backward()
            losses.append(loss)
            return loss

        assert two.step(backward) is losses[number]
    assert equal(values(a), values(b))
    assert_alike(one, two)


@on_ranks()
@rows(LOCAL)
def test_compiled_models_and_steps_do_the_same(rank, size, which):
    # Buckets of the usual size: torch compiles no model with a smaller second one.
    a, b = (wrap(which, net(), bucket_cap_mb=25) for _ in range(2))
    b = torch.compile(b, backend="eager")
    options = {"codec": "fp32"} if which == "local" else {}
    one, two = coded(which, a, **options), coded(which, b, **options)
    take = torch.compile(two.step, backend="eager")
    for number in range(4):
        step(a, one, gradients(rank, number))
        two.zero_grad()
        b(gradients(rank, number)).backward()
        take()
    if which == "local":  # torch's own compiled step rounds otherwise
        torch.testing.assert_close(values(a), values(b), rtol=1e-5, atol=1e-6)
        assert two.local.rounds == 2
        return
    assert equal(values(a), values(b))
    assert_alike(one, two)


@on_ranks(2, then=all_equal)
@in_ddp
def test_parameters_that_get_no_gradient(rank, size, which):
    """A parameter that no rank uses at first, and one that only one rank uses."""
    model, optimizer = make(which)
    before = dict(zip(SHAPES, values(model), strict=True))
    for number in range(6):
        given = gradients(rank, number)
        if number < 3:
            del given["small"]
        if rank == 1:
            del given["big"]
        step(model, optimizer, given)
        now = dict(zip(SHAPES, values(model), strict=True))
        assert torch.equal(now["small"], before["small"]) == (number < 3)
        assert not torch.equal(now["big"], before["big"])
    # One that joins late moves as far as learning rates allow, not by a second moment of zero.
    assert float((now["small"] - before["small"]).abs().max()) < 0.2
    return values(model)


@on_ranks(2)
@in_ddp
def test_a_parameter_that_is_unused_for_a_while_waits(rank, size, which):
    """Whether its gradient is None or zeros, which are no momentum to step by."""
    found = []
    for to_none in (True, False):
        model, optimizer = make(which)
        for number in range(9):
            names = ("big", "bias") if 3 <= number < 6 else ()
            optimizer.zero_grad(set_to_none=to_none)
            model(gradients(rank, number, *names)).backward()
            optimizer.step()
        found.append((values(model), list(optimizer.state_dict()["state"].values())))
    assert equal(*found)


@on_ranks(2, timeout=60)
@in_ddp
def test_join_is_refused(rank, size, which):
    model, optimizer = make(which)
    # The other rank hears that this one has left.
    match = "left the group" if rank else "equally many batches"
    with pytest.raises(Error, match=match), Join([model]):
        train(model, optimizer, rank, range(1 + rank))


# ---------------------------------------------------------------- overflows


@on_ranks()
@rows()
@pytest.mark.parametrize("what", [float("inf"), float("nan")])
@pytest.mark.parametrize("codes_all", [False, True])
def test_a_step_that_overflows_leaves_no_trace(rank, size, which, what, codes_all):
    """With a scaler: without one torch takes what is not finite, and so do exact parameters.

    Where all parameters are coded, those of one dimension have residuals of scaled gradients."""
    codec: dict[str, Any] = {"codec": pycomm.Policy("int4", rules=())} if codes_all else {}
    (a, one) = make(which, **codec)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    (b, two) = make(which, scaler=scaler, **codec)
    for number in range(7):
        bad = number in (1, 5)
        if not bad:
            step(a, one, gradients(rank, number))
        two.zero_grad()
        given = gradients(rank, number)
        if bad and rank == size - 1:
            given["big"].view(-1)[7] = what
        scaler.scale(b(given)).backward()
        if number in (5, 6):
            scaler.unscale_(two)
        scaler.step(two)
        scaler.update()
    assert scaler.get_scale() == 256
    # The loss scale is a power of two, so it changes no bit.
    assert equal(values(a), values(b))
    if not codes_all:
        assert_alike(one, two)


@on_ranks(2)
@in_ddp
def test_an_unknown_scaler_is_an_error(rank, size, which):
    model, optimizer = make(which)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(gradients(rank, 0))).backward()
    with pytest.raises(Error, match="scaler="):
        scaler.step(optimizer)


# ---------------------------------------------------------------- clipping


@on_ranks()
@rows()
def test_a_factor_is_not_a_part_of_the_momentum(rank, size, which):
    """Such as that of `clip_grad_norm_`: it counts for the distance of SGD's step alone. Padding
    may stand among the first values, by which a factor is recognised."""
    shapes = {"odd": (7, 13), "even": (64, 64)}
    found, moves = [], []
    for factor in (1.0, 0.25):
        model = wrap(which, Chosen(shapes, 0.01))
        optimizer = coded(which, model, codec=pycomm.Policy("sign", rules=()), weight_decay=0.0)
        for number in range(5):
            before = values(model)
            optimizer.zero_grad()
            model(harness.gradients(rank, number, shapes=shapes)).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
            optimizer.step()
        found.append([whole(s[MOMENTUM[which.split()[0]]]) for s in optimizer.state.values()])
        moves.append([a - b for a, b in zip(values(model), before, strict=True)])
    assert equal(*found)
    by = 0.25 if which.startswith("sgd") else 1.0
    for whole_move, scaled_move in zip(*moves, strict=True):
        # The difference of rounded parameters, which lie elsewhere.
        torch.testing.assert_close(scaled_move, by * whole_move, rtol=1e-4, atol=1e-7)


SILENCES = [(*row, codec, range(2)) for row in [*ROWS, LOCAL] for codec in ("sign", "int4")]
# Second moments of betas[1] = 0.5 would have vanished, as those of 0.95 do in 2,000 steps.
SILENCES += [(w, 2, "sign", range(2, 162)) for w in ("adamw", "adamw on shards")]


@on_ranks(then=all_equal)
@pytest.mark.parametrize(("which", "ranks", "codec", "silent"), SILENCES)
def test_a_matrix_without_gradient_for_a_while_is_trained(rank, size, which, codec, silent):
    """LoRA's first factor has zeros in its first step, an idle expert in thousands of steps."""
    model = wrap(which, net())
    options = {"betas": (0.9, 0.5)} if len(silent) > 2 else {}
    optimizer = coded(which, model, codec=codec, **options)
    most = 10 * optimizer.param_groups[0]["lr"]
    for number in range(silent.stop + 4):
        given = gradients(rank, number)
        if number in silent:
            given["big"] = torch.zeros_like(given["big"])
        before = values(model)
        step(model, optimizer, given)
        moved = [a - b for a, b in zip(values(model), before, strict=True)]
        assert number < silent.stop or all(one.abs().max() < most for one in moved)
    assert all(one.isfinite().all() and one.any() for one in moved)
    return values(model)


@on_ranks(then=all_equal)
@rows()
def test_values_that_were_clipped_stay_so(rank, size, which):
    """`clip_grad_value_` changes single values, which a step does not take back."""
    (a, one), (b, two) = make(which), make(which)
    before = values(a)
    for number in range(4):
        for model, optimizer in ((a, one), (b, two)):
            optimizer.zero_grad()
            model(gradients(rank, number)).backward()
            if model is b:
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
    far, near_ = (
        [float((now - was).norm()) for now, was in zip(values(model), before, strict=True)][:2]
        for model in (a, b)
    )
    assert all(x < 0.1 * y for x, y in zip(near_, far, strict=True))
    return values(b)


@on_ranks(1)
@in_ddp
@pytest.mark.parametrize("wrapper", ["shards", "replicas"])
def test_one_rank_of_any_wrapper_does_the_same(rank, size, which, wrapper):
    """torch's FSDP2 scatters nothing on one rank, and calls no collective."""
    found = []
    for row in (which, f"{which} on {wrapper}"):
        model, optimizer = make(row)
        train(model, optimizer, rank, range(4))
        found.append(values(model))
    assert equal(*found)
