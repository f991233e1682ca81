"""How much of the ranks' gradients agrees: the squares of their mean, beside the mean of squares.

Adam's second moment is that of the mean gradient. Ranks that exchange sums of the squares of their
own gradients get more: noise of n ranks, of which the mean has 1 / n in squares. The two are
compared on one random number of some rows of a matrix, the row times random signs, whose square is
that of the row in expectation (Alon et al. 1996). Every rank takes the same rows and signs, so that
equal gradients agree exactly.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.philox import random_words

ROWS = 64
"""Most rows that are taken in a step; in other steps it is others' turn."""
_SEED = 0x5EED_0F_A6EE
_TURNS = 1021  # a prime number of places at which the signs of a step begin
_STRIDE = 389


def turn(rows: int, step: int) -> tuple[int, int]:
    """Return whose turn it is in a step, of a matrix's rows: the first, and the distance of others.

    The first one has the first place among the ROWS numbers.
    """
    stride = max(1, -(-rows // ROWS))
    return step % stride, stride


def place_of_signs(step: int) -> int:
    """Return where the signs of a step begin in `table`."""
    return step * _STRIDE % _TURNS


@lru_cache(maxsize=64)
def table(columns: int, device: torch.device) -> torch.Tensor:
    """Return the signs of all steps, one behind the other, float32."""
    words = random_words(RandomKey(_SEED, 0, 0), 0, columns + _TURNS, device)
    return 1.0 - 2.0 * (words >> 31).float()
