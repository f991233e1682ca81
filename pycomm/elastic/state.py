"""Send and receive a pickled state with its tensors, along a chain of ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from pycomm.elastic.chain import Message, Receiver, Sender, send_ahead
from pycomm.elastic.chunks import Chunks
from pycomm.elastic.contents import Form, empty, read_forms
from pycomm.policy.exchange import bytes_of

How = tuple[int, bool]
"""Size of a chunk in bytes, and whether floats are coded."""
Packed = tuple[bytes, list[Form], list[torch.Tensor]]
"""A pickle, and the tensors that it refers to, with their forms."""


def send(to: Sender, known: Sequence[torch.Tensor], packed: Packed, how: How) -> None:
    """Send a state.

    Args:
        to: where to.
        known: tensors whose forms the receiver knows.
        packed: the rest.
        how: the same on all ranks.
    """
    pickled, forms, rest = packed
    preface = torch.frombuffer(bytearray(pickle.dumps((pickled, forms))), dtype=torch.uint8)
    with ThreadPoolExecutor(1, "pycomm-hand-over") as coder:
        chunks = Chunks([*known, *rest], *how)
        send_ahead(to, [lambda: (preface, False)])
        send_ahead(to, _encoded(chunks, coder))
        to.end()


def _encoded(chunks: Chunks, coder: ThreadPoolExecutor) -> Iterator[Callable[[], Message]]:
    """Yield functions that wait for the messages; the one after it is being made, too."""
    following: Future[Message] | None = None
    for chunk in chunks.all:
        made, following = following, coder.submit(chunks.encode, chunk)
        if made is not None:
            yield made.result
    if following is not None:
        yield following.result


def receive(
    receiver: Receiver, known: Sequence[Form], how: How
) -> tuple[list[torch.Tensor], Packed]:
    """Receive a state. An error of this rank alone does not hold up the sender.

    Args:
        receiver: from where.
        known: the forms of what the sender sends as `known`.
        how: the same on all ranks.

    Returns:
        the tensors of `known`, and the rest; on the CPU.
    """
    try:
        with ThreadPoolExecutor(1, "pycomm-hand-over") as coder:
            return _receive(receiver, known, how, coder)
    except Exception:
        receiver.fail()
        raise


def _receive(
    receiver: Receiver, known: Sequence[Form], how: How, coder: ThreadPoolExecutor
) -> tuple[list[torch.Tensor], Packed]:
    receiver.expect(2)  # the preface, and the end
    ((preface, _),) = receiver.receive([None])
    pickled, forms = read_forms(bytes_of(preface))
    staged = [empty(form) for form in known]
    rest = [empty(form) for form in forms]
    chunks = Chunks([*staged, *rest], *how)
    receiver.expect(len(chunks.all))
    decoding: Future[None] | None = None
    messages = receiver.receive([(chunk.room, chunk.nbytes) for chunk in chunks.all])
    for chunk, (received, coded) in zip(chunks.all, messages, strict=True):
        if decoding is not None:
            decoding.result()
        decoding = coder.submit(chunks.decode, chunk, received, coded)
    if decoding is not None:
        decoding.result()
    receiver.end()
    return staged, (pickled, forms, rest)
