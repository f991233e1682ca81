"""Rows of faint gradients under CodedAdamW, such as those of bytes that a text no longer has."""

from __future__ import annotations

import pytest

from tests.torch.hooks.test_ddp_compress import gradients
from tests.torch.optim.test_coded_adamw import EDEN, SIZES, make


def with_faint_rows(rank: int, size: int, codec: str) -> float:
    """Return the most that a value moves in a step, in learning rates, while rows fade."""
    model, optimizer = make(codec, betas=(0.9, 0.8))
    most = 0.0
    for step in range(60):
        faint = gradients(rank, step)
        faint["big"][3:9] *= 0.5**step
        before = model.module.big.detach().clone()
        optimizer.zero_grad()
        model(faint).backward()
        optimizer.step()
        kept = before * (1 - SIZES["lr"] * SIZES["weight_decay"])
        most = max(most, float((model.module.big.detach() - kept).abs().max()) / SIZES["lr"])
    return most


@pytest.mark.parametrize("codec", ["sign", EDEN])
def test_coding_errors_do_not_move_rows_of_faint_gradients(pool, codec):
    # Adam's coordinates move by a learning rate or two, and codes of one bit add some.
    assert max(pool.run(with_faint_rows, codec)) < 6
