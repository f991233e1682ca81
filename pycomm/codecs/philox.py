"""Random words of a tensor in plain torch: Philox4x32-10, docs/wire/quant.md."""

from __future__ import annotations

import torch

from pycomm.codecs.args import RandomKey

LOW = 0xFFFFFFFF


def _times(factor: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower 32 bits of factor * x; int64 wraps without harm to the bits."""
    product = x * factor
    return (product >> 32) & LOW, product & LOW


def random_words(key: RandomKey, index: int, numel: int, device: torch.device) -> torch.Tensor:
    """Return the words of values ``index`` to ``index + numel - 1`` as int64 [numel] in [0, 2^32).

    ``index`` must be a multiple of 4.
    """
    group = index // 4 + torch.arange(-(-numel // 4), dtype=torch.int64, device=device)
    return words_of_groups(key.seed, group, key.tensor, key.step).view(-1)[:numel]


def derived_seed(key: RandomKey) -> int:
    """Return a 64-bit seed for other words: the first two of a group that belongs to no value."""
    group = torch.tensor([1 << 62], dtype=torch.int64, device="cpu")
    low, high, *_ = _words(key.seed, group, key.tensor, key.step).view(-1).tolist()
    return int(high << 32 | low)


def words_of_groups(
    seed: int | torch.Tensor, group: torch.Tensor, tensor: int, step: int = 0
) -> torch.Tensor:
    """Return the four words of each element of ``group``, int64 [groups, 4].

    A seed that is a tensor (int64 with the bits of 64) is not waited for.
    """
    return _words(seed, group & ((1 << 62) - 1), tensor, step)  # indices count modulo 2^64


def _words(seed: int | torch.Tensor, group: torch.Tensor, tensor: int, step: int) -> torch.Tensor:
    c0, c1 = group & LOW, group >> 32
    c2, c3 = torch.full_like(group, tensor), torch.full_like(group, step)
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(10):
        high0, low0 = _times(0xD2511F53, c0)
        high1, low1 = _times(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return torch.stack((c0, c1, c2, c3), dim=1)
