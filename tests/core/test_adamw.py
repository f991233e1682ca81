"""A step of AdamW over many tensors in one call: against the formula, with equal bits anywhere."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pycomm.optim import coded_adamw  # noqa: E402

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SIZES = [0, 1, 5, 16, 1031]


def given(sizes=SIZES, steps=0.0):
    """Return parameters, gradients and states, of which some values are tiny."""
    generator = torch.Generator().manual_seed(sum(sizes))
    parameters = [torch.randn(n, generator=generator) for n in sizes]
    gradients = [torch.randn(n, generator=generator) * 1e-2 for n in sizes]
    for gradient in gradients:
        gradient[::3] *= 1e-18  # their squares are denormal numbers
    states = [
        {
            "step": torch.tensor(steps + i),
            "exp_avg": torch.randn(n, generator=generator) * 1e-2 * (steps > 0),
            "exp_avg_sq": torch.rand(n, generator=generator) * 1e-4 * (steps > 0),
        }
        for i, n in enumerate(sizes)
    ]
    return parameters, gradients, states


def step(parameters, gradients, states, settings=SETTINGS):
    coded_adamw.step_by_adamw(settings, parameters, gradients, states, as_torch=False)


@pytest.mark.parametrize("steps", [0.0, 7.0])
def test_every_bit_is_that_of_single_operations(steps):
    """NumPy rounds each of them once, square roots and quotients included."""
    parameters, gradients, states = given(steps=steps)
    x, g, m, v = (
        torch.cat(values).numpy().copy()
        for values in (
            *(parameters[-1:], gradients[-1:]),
            *([states[-1][key]] for key in ("exp_avg", "exp_avg_sq")),
        )
    )
    t, f = float(states[-1]["step"]) + 1, np.float32
    lr, (beta1, beta2), eps = SETTINGS["lr"], SETTINGS["betas"], SETTINGS["eps"]
    m = m + f(1 - beta1) * (g - m)
    v = v * f(beta2) + f(1 - beta2) * g * g
    divisor = np.sqrt(v) / f((1 - beta2**t) ** 0.5) + f(eps)
    x = x * f(1 - lr * SETTINGS["weight_decay"]) - f(lr / (1 - beta1**t)) * m / divisor
    step(parameters, gradients, states)
    found = parameters[-1], states[-1]["exp_avg"], states[-1]["exp_avg_sq"]
    for ours, want in zip(found, (x, m, v), strict=True):
        assert np.array_equal(ours.numpy().view(np.int32), want.view(np.int32))


def bits(parameters, states):
    return [
        t.view(torch.int32).tolist()
        for x, state in zip(parameters, states, strict=True)
        for t in (x, state["exp_avg"], state["exp_avg_sq"])
    ]


def test_a_values_bits_depend_on_nothing_but_the_value():
    (x,), (g,), (state,) = given([40_001], 3.0)
    whole = copy.deepcopy(([x], [g], [state]))
    step(*whole)
    cuts = [0, 1, 18, 1042, 40_001]
    slices = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    parts = [x[s] for s in slices], [g[s] for s in slices], []
    for s in slices:
        own = {"step": state["step"].clone(), "exp_avg": state["exp_avg"][s]}
        parts[2].append(own | {"exp_avg_sq": state["exp_avg_sq"][s]})
    step(*parts)
    assert bits([x], [state]) == bits(whole[0], whole[2])


def test_threads_and_flushing_change_no_bits():
    found, threads = [], torch.get_num_threads()
    for count, flush in ((1, False), (3, False), (3, True)):
        parameters, gradients, states = given([5, (3 << 18) + 11])
        torch.set_num_threads(count)
        try:
            assert torch.set_flush_denormal(flush)
            step(parameters, gradients, states)
        finally:
            torch.set_flush_denormal(False)
            torch.set_num_threads(threads)
        found.append((parameters, states))
    for parameters, states in found[1:]:
        for ours, theirs in zip(parameters, found[0][0], strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
        for ours, theirs in zip(states, found[0][1], strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(ours[key].view(torch.int32), theirs[key].view(torch.int32))


@pytest.mark.parametrize("kind", ["transposed", "double", "bfloat16"])
def test_other_tensors_take_torchs_step(kind):
    made = torch.randn(6, 8)
    x = {"transposed": made.t(), "double": made.double(), "bfloat16": made.bfloat16()}[kind]
    state = {"step": torch.tensor(0.0)}
    state |= {key: torch.zeros_like(x) for key in ("exp_avg", "exp_avg_sq")}
    same = torch.nn.Parameter(x.clone())
    same.grad = x.clone()
    step([x], [x.clone()], [state])
    torch.optim.AdamW([same], foreach=True, **SETTINGS).step()
    assert torch.equal(x, same)
