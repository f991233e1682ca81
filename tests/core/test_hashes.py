"""CRC-32C and Philox against published vectors, SHA-256 and HMAC-SHA256 against Python's own."""

from __future__ import annotations

import hashlib
import hmac
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pycomm.errors
from pycomm import _C, _test


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),  # the catalogue's check value
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_crc32c_known_answers(data, checksum):
    assert _C.crc32c(data) == checksum


def crc32c(data: bytes) -> int:
    """Bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@given(data=st.binary(max_size=100), cut=st.integers(0, 100))
def test_crc32c_continues(data, cut):
    assert _C.crc32c(data) == crc32c(data)
    assert _C.crc32c(data[cut:], _C.crc32c(data[:cut])) == _C.crc32c(data)


@pytest.mark.parametrize("way", _test.crc32c_ways())
def test_crc32c_is_the_same_by_every_way(way):
    data = random.Random(1).randbytes(8000)
    # Ways change at 256, 512 and 3072 bytes; the table is checked against the bits above.
    for size in [*range(0, 1100, 7), 3071, 3072, 3073, 6144, 6500, 8000 - 3]:
        for start in (0, 3):
            part, before = data[start : start + size], size * 0x9E3779B1 & 0xFFFFFFFF
            assert _test.crc32c_by(way, part, before) == _test.crc32c_by("table", part, before)


def test_crc32c_takes_the_fastest_way():
    data = bytes(range(256)) * 5
    assert _C.crc32c(data, 7) == _test.crc32c_by(_test.crc32c_ways()[0], data, 7)
    assert _test.crc32c_ways()[-1] == "table"
    with pytest.raises(pycomm.errors.Error, match='no CRC-32C by "guess"'):
        _test.crc32c_by("guess", data)


@given(st.binary(max_size=300))
def test_sha256_equals_hashlib(message):
    assert _test.sha256(message) == hashlib.sha256(message).digest()


@given(key=st.binary(max_size=200), message=st.binary(max_size=200))
def test_hmac_equals_python_s(key, message):
    assert _test.hmac_sha256(key, message) == hmac.digest(key, message, "sha256")


# ----------------------------------------------------------------------------------------- Philox
# Philox4x32-10: Random123's known answers, and the layout of csrc/core/philox.h.


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


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_known_answers(counter, key, output):
    assert _test.philox(words(counter), words(key)) == words(output)


def test_words_are_named_by_seed_step_tensor_and_group():
    seed, step, tensor, group = 0x0123456789ABCDEF, 7, 11, 0x500000003
    want = _test.philox([0x00000003, 0x5, tensor, step], [0x89ABCDEF, 0x01234567])
    assert _test.random_words(seed, step, tensor, group) == want
