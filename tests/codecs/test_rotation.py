"""The rotation of eden beyond its bytes: it can be undone, keeps lengths, depends on the key."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.codecs.args import RandomKey
from pycomm.codecs.rotation import SIZES, hadamard, header, random_bits, rotate, unrotate

NORMAL = torch.randn(20000, generator=torch.Generator().manual_seed(0))
KEY = RandomKey(seed=0xFEDCBA9876543210, step=3, tensor=0x80000001)


@pytest.mark.parametrize("size", [32, 128, 1024])
def test_the_transform_is_hadamards(size):
    rows, matrix = torch.eye(size), torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    assert torch.equal(hadamard(rows), matrix)


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_can_be_undone(size):
    head = header(KEY, 5 * size, torch.device("cpu"))
    p = torch.randint(-8, 9, (3 * size - 7,), generator=torch.Generator().manual_seed(1)).float()
    # The error is some 20 roundings of 2^-24 of lengths near 200, shared by all values.
    bound = 20 * 2.0**-24 * float(p.norm())
    assert float((unrotate(rotate(p, head, size), head, p.numel()) - p).abs().max()) < bound


@pytest.mark.parametrize("size", SIZES)
def test_all_lengths_change_alike(size):
    head = header(KEY, 0, torch.device("cpu"))
    steps = 2 * (size.bit_length() - 1) if size < 1024 else size.bit_length() + 5
    want = 77 / 128 if steps % 2 == 0 else 77 / 64
    for p in (torch.randn(size, generator=torch.Generator().manual_seed(2)), torch.eye(size)[7]):
        longer = rotate(p, head, size).double().square().sum() / p.double().square().sum()
        assert float(longer) == pytest.approx(want, rel=1e-5)


def test_signs_are_words_of_the_core():
    head = header(KEY, 96, torch.device("cpu"))
    words = _C.random_words(KEY.seed, KEY.step, KEY.tensor, 2**62)
    assert head[:8].tolist() == list((words[1] << 32 | words[0]).to_bytes(8, "little"))
    drawn = _C.random_words(words[1] << 32 | words[0], 0, 0, 0)[3]
    assert random_bits(head, 32).tolist() == [drawn >> i & 1 for i in range(32)]


@pytest.mark.parametrize("spec", ["eden:bits=4,size=32", "eden2", "eden:bits=1,size=4096"])
def test_parts_decode_as_the_whole(spec):
    codec, x = pycomm.codec(spec), NORMAL[:20000]
    whole = codec.decode(codec.encode(x, key=KEY), x.numel())
    cut = 2 * codec.granule
    first, last = x[:cut].clone(), x[cut:].clone()
    assert torch.equal(codec.decode(codec.encode(first, key=KEY), cut), whole[:cut])
    payload = codec.encode(last, key=KEY, index=cut)
    assert torch.equal(codec.decode(payload, last.numel()), whole[cut:])


def test_every_part_of_the_key_and_the_index_change_the_signs():
    codec, x = pycomm.codec("eden:bits=8"), NORMAL[:1024]
    keys = [RandomKey(), RandomKey(seed=1), RandomKey(step=1), RandomKey(tensor=1)]
    payloads = [codec.encode(x, key=key)[16:] for key in keys] + [codec.encode(x, index=1024)[16:]]
    assert len({bytes(payload.tolist()) for payload in payloads}) == len(payloads)
