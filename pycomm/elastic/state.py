"""Send and receive a pickled state with its tensors, along a chain of ranks.

The messages are the header with the bytes of the preface and of all tensors, the preface, the
tensors in chunks, and an empty one at the end: the sender's word that it had all of them itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence

import torch

from pycomm.elastic.chain import Receiver, Sender
from pycomm.elastic.chunks import Chunks, cut
from pycomm.elastic.contents import Form, StateError, empty, read_forms
from pycomm.policy.exchange import bytes_of

Packed = tuple[bytes, list[Form], list[torch.Tensor]]
"""A pickle, and the tensors that it refers to, with their forms."""


def _sizes(preface: int, total: int, chunk_bytes: int) -> Iterator[int]:
    """Yield the sizes of the messages after the header."""
    yield preface
    yield from (end - begin for begin, end in cut(total, chunk_bytes))
    yield 0


def send(to: Sender, known: Sequence[torch.Tensor], packed: Packed, chunk_bytes: int) -> None:
    """Send a state; if it fails, the receiver is told.

    Args:
        to: where to.
        known: tensors whose forms the receiver knows.
        packed: the rest.
        chunk_bytes: size of a chunk, the same on all ranks.
    """
    try:
        pickled, forms, rest = packed
        preface = torch.frombuffer(bytearray(pickle.dumps((pickled, forms))), dtype=torch.uint8)
        chunks = Chunks([*known, *rest], chunk_bytes)
        sizes = preface.numel(), chunks.total
        to.send(torch.tensor(sizes, dtype=torch.int64, device="cpu").view(torch.uint8))
        to.announce(_sizes(*sizes, chunk_bytes))
        to.send(preface)
        for chunk in chunks.all:
            to.send(chunks.read(chunk))
        to.send(preface[:0])
        to.finish()
    except BaseException:
        to.fail()
        raise


def receive(
    receiver: Receiver, known: Sequence[Form], chunk_bytes: int
) -> tuple[list[torch.Tensor], Packed]:
    """Receive a state. An error of this rank alone does not hold up the sender.

    Args:
        receiver: from where.
        known: the forms of what the sender sends as `known`.
        chunk_bytes: size of a chunk, the same on all ranks.

    Returns:
        the tensors of `known`, and the rest; on the CPU.
    """
    try:
        return _receive(receiver, known, chunk_bytes)
    except Exception:
        receiver.fail()
        raise


def _receive(
    receiver: Receiver, known: Sequence[Form], chunk_bytes: int
) -> tuple[list[torch.Tensor], Packed]:
    preface, total = receiver.receive().view(torch.int64).tolist()
    receiver.expect(_sizes(max(0, preface), max(0, total), chunk_bytes))
    pickled, forms = read_forms(bytes_of(receiver.receive()))
    staged = [empty(form) for form in known]
    rest = [empty(form) for form in forms]
    chunks = Chunks([*staged, *rest], chunk_bytes)
    if chunks.total != total:
        raise StateError(f"another member sends {total} bytes of {chunks.total} of its tensors")
    for chunk in chunks.all:
        chunks.write(chunk, receiver.receive())
    receiver.receive()
    receiver.finish()
    return staged, (pickled, forms, rest)
