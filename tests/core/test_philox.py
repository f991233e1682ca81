"""Philox4x32-10: Random123's known answers, and the layout of csrc/core/philox.h."""

from __future__ import annotations

import pytest

from pycomm import _C

M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85

# counter, key, output: the file kat_vectors of Random123.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """The paper's section 3.3 in plain integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        a, b = M0 * c[0], M1 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF
    return c


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_known_answers(counter, key, output):
    assert _C.philox(words(counter), words(key)) == words(output)
    assert philox(words(counter), words(key)) == words(output)


def test_words_are_named_by_seed_step_tensor_and_group():
    seed, step, tensor, group = 0x0123456789ABCDEF, 7, 11, 0x500000003
    want = philox([0x00000003, 0x5, tensor, step], [0x89ABCDEF, 0x01234567])
    assert _C.random_words(seed, step, tensor, group) == want


def test_equals_triton(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton")
    import torch
    import triton.language as tl

    @triton.jit
    def kernel(out, seed, step, tensor, SIZE: tl.constexpr):
        group = tl.arange(0, SIZE)
        zero = tl.zeros_like(group)
        a, b, c, d = tl.philox(seed, group, zero, zero + tensor, zero + step)
        tl.store(out + group * 4, a)
        tl.store(out + group * 4 + 1, b)
        tl.store(out + group * 4 + 2, c)
        tl.store(out + group * 4 + 3, d)

    seed, step, tensor = 0x0123456789ABCDEF, 7, 11
    out = torch.zeros(64, dtype=torch.uint32)
    kernel[(1,)](out, seed, step, tensor, SIZE=16)
    want = [word for group in range(16) for word in _C.random_words(seed, step, tensor, group)]
    assert out.tolist() == want
