"""powersgd as a codec of one tensor: size, error and shapes."""

from __future__ import annotations

import math

import pytest
import torch

import pycomm
from pycomm.codecs import Cast, PowerSGD, RandomKey
from pycomm.codecs.powersgd import orthonormal
from pycomm.policy import Parameter, Policy


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "columns"), [(64, 48), (48, 64), (7, 500), (1, 9), (3, 3)])
def test_a_matrix_of_that_rank_comes_back(rows, columns):
    rank = min(3, rows, columns)
    matrix = randn(rows, rank) @ randn(rank, columns, seed=1)
    codec = PowerSGD(rank=4, rows=rows)
    payload = codec.encode(matrix)
    assert payload.numel() == codec.encoded_bytes(matrix.numel())
    assert payload.numel() == 4 * min(4, rows, columns) * (rows + columns)
    got = codec.decode(payload, matrix.numel()).view(rows, columns)
    # Sums of up to 500 products in float32.
    assert (got - matrix).norm() < 1e-5 * matrix.norm()


def test_the_error_is_a_projection():
    """The sent part and the lost part are orthogonal, so encoding never makes a matrix longer."""
    matrix = randn(200, 300)
    got = PowerSGD(rank=8, rows=200).decode(PowerSGD(rank=8, rows=200).encode(matrix), 60000)
    lost = matrix.view(-1) - got
    assert abs(torch.dot(lost, got)) < 1e-4 * matrix.norm() ** 2  # float32 sums of 60000 products
    assert 0 < got.norm() < matrix.norm()


def test_the_residual_is_what_was_lost():
    x, residual = randn(40, 60), randn(2400, seed=1)
    codec, owed = PowerSGD(rows=40), torch.empty(2400)
    payload = codec.encode(x, residual=residual, new_residual=owed)
    torch.testing.assert_close(codec.decode(payload, 2400) + owed, x.view(-1) + residual)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_not_finite_arrive_and_leave_no_residual(bad):
    x, residual = randn(40, 60), randn(2400, seed=1)
    x[3, 5] = bad
    before = residual.clone()
    payload = PowerSGD(rows=40).encode(x, residual=residual)
    assert not PowerSGD(rows=40).decode(payload, 2400).isfinite().any()
    assert torch.equal(residual, before)


def test_the_start_is_a_function_of_the_key():
    codec = PowerSGD(rank=2, rows=10)
    start = codec.start(200, RandomKey(seed=1, tensor=3), torch.device("cpu"))
    assert start.shape == (20, 2)
    assert start.abs().max() <= 1
    assert torch.equal(start, codec.start(200, RandomKey(1, 0, 3), torch.device("cpu")))
    assert not torch.equal(start, codec.start(200, RandomKey(1, 0, 4), torch.device("cpu")))


def test_dependent_columns_give_a_basis():
    column = randn(50, 1)
    for matrix in (column.expand(50, 4).contiguous(), torch.zeros(50, 4), randn(50, 4)):
        basis = orthonormal(matrix)
        torch.testing.assert_close(basis.t() @ basis, torch.eye(4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (5000,), (100000, 1), (8, 8), (64, 0), (16, 16)])
def test_parameters_without_thin_factors_stay_exact(shape):
    assert pycomm.codec("powersgd:4").fit(shape) == Cast("float32")


def test_a_policy_fits_it_to_each_parameter():
    policy = Policy("powersgd:2")
    conv = policy.decide(Parameter("conv", (64, 32, 3, 3), torch.float32))
    assert conv.codec == PowerSGD(rank=2, rows=64)
    assert conv.codec.encoded_bytes(conv.parameter.numel) == 4 * 2 * (64 + 288)
    assert conv.reason == "default"
    thin = policy.decide(Parameter("thin", (4000, 2), torch.float32))
    assert thin.exact
    assert thin.reason == "powersgd does not fit its shape"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("powersgd:0", "rank=0"),
        ("powersgd:min_compression=0.5", "at least 1"),
    ],
)
def test_options_that_make_no_sense(spec, text):
    with pytest.raises(ValueError, match=text):
        pycomm.codec(spec)


def test_rows_that_do_not_divide_the_values():
    with pytest.raises(ValueError, match="not a matrix of 7 rows"):
        PowerSGD(rows=7).encoded_bytes(50)
    assert pycomm.codec(PowerSGD(rows=7).spec()) == PowerSGD(rows=7)
