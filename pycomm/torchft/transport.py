"""How a replica that heals gets its state from another one, for torchft's Manager."""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torchft.checkpointing import CheckpointTransport

from pycomm.arguments import typed, whole
from pycomm.elastic import parts, state
from pycomm.elastic.chain import PAIRS, Receiver, Sender
from pycomm.elastic.contents import Pickler, form, read
from pycomm.elastic.transfer import CODECS
from pycomm.errors import Error
from pycomm.log import logger
from pycomm.torchft.group import ProcessGroupPycomm

_NOTES = 0x7063FFFF  # tag of what the sender tells each receiver first
_CPU = torch.device("cpu")

T = TypeVar("T")


class HandOverTransport(CheckpointTransport[T], Generic[T]):  # type: ignore[misc]
    """Hands the state of a replica over to those that heal, through the Manager's own group.

    It does what `pycomm.elastic.hand_over` does: float32 and bfloat16 travel coded without loss,
    and of several new replicas each passes the state on to the next while it comes, so each link
    carries it once. The sender trains on meanwhile, until the step's vote.

    Replicas read from each other containers, numbers, texts and tensors, and objects of the classes
    that were given to ``torch.serialization.add_safe_globals``. Of sharded tensors (FSDP2) each
    rank of a replica hands over its own part.

    Args:
        group: the Manager's process group.
        codec: "lossless", or "none" for links that are faster than the codec; the same everywhere.
        chunk_bytes: size of the messages before they are coded, in bytes, at least 4096; the same
            everywhere. Three of them have to pass a link within the group's timeout.
        state_dict: the Manager's function of this name, from which a replica that heals knows its
            own meshes; needed if the state has sharded tensors.

    Raises:
        TypeError, ValueError: bad arguments.

    Example:
        >>> group = ProcessGroupPycomm()  # doctest: +SKIP
        >>> manager = torchft.Manager(  # doctest: +SKIP
        ...     pg=group, checkpoint_transport=HandOverTransport(group), ...
        ... )
    """

    def __init__(
        self,
        group: ProcessGroupPycomm,
        *,
        codec: str = "lossless",
        chunk_bytes: int = 4 << 20,
        state_dict: Callable[[], object] | None = None,
    ) -> None:
        typed("group", group, ProcessGroupPycomm)
        self._group = group
        if codec not in CODECS:
            raise ValueError(f"codec={codec!r}: want one of {', '.join(CODECS)}")
        self._how = (whole("chunk_bytes", chunk_bytes, 4096), codec == "lossless")
        self._state_dict = state_dict
        self._thread = ThreadPoolExecutor(1, "pycomm-hand-over")
        self._sending: Future[None] | None = None

    def metadata(self) -> str:
        """Return what the other side must have, too."""
        chunk_bytes, coded = self._how
        return f"pycomm hand-over, chunk_bytes={chunk_bytes}, lossless={coded}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Begin to send a state, which must not be changed before `disallow_checkpoint` returns.

        Raises:
            Error: the state has something that others would not read.
        """
        self.disallow_checkpoint()
        written = io.BytesIO()
        pickler = Pickler(written)
        pickler.dump(state_dict)
        known = parts.meshes(tree_leaves(state_dict))
        try:
            read(written.getvalue(), pickler.tensors, known)
        except Exception as error:
            raise Error(f"this replica's state cannot be handed over: {error}") from error
        packed = written.getvalue(), [form(tensor) for tensor in pickler.tensors], pickler.tensors
        chain = sorted(dst_ranks)
        self._sending = self._thread.submit(self._send, chain, step, packed)

    def disallow_checkpoint(self) -> None:
        """Wait until the state was sent. An error ends the receiver's step, not this one's."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        error = sending.exception()
        if error is not None:
            logger.warning("the state was not handed over: %s", error)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive a state.

        Raises:
            Error: the sender's transport or step is another.
            PeerLost: it is gone.
            Timeout: it did not come.
        """
        if metadata != self.metadata():
            raise Error(
                f"the replica that has the state would send it by {metadata!r}, and this one "
                f"expects {self.metadata()!r}: make the same transport on all replicas"
            )
        group = self._group.group
        note = torch.zeros(4, dtype=torch.int64, device="cpu")
        group.recv([note], src_rank, _NOTES).wait()
        theirs, transfer, before, after = note.tolist()
        to = Sender(group, after, _CPU, transfer) if after >= 0 else None
        _, (pickled, _, tensors) = state.receive(
            Receiver(group, before, _CPU, transfer, to), [], self._how
        )
        if theirs != step:
            raise Error(f"rank {src_rank} has sent the state of step {theirs}, not of {step}")
        own = self._state_dict() if self._state_dict is not None else None
        found: T = read(pickled, tensors, parts.meshes(tree_leaves(own)))
        return found

    def shutdown(self, wait: bool = True) -> None:
        """End the thread that sends."""
        self._thread.shutdown(wait)

    def _send(self, chain: list[int], step: int, packed: Any) -> None:
        group = self._group.group
        transfer = secrets.randbelow(PAIRS)
        before = [group.rank(), *chain]
        for place, rank in enumerate(chain):
            after = chain[place + 1] if place + 1 < len(chain) else -1
            note = torch.tensor(
                [step, transfer, before[place], after], dtype=torch.int64, device="cpu"
            )
            group.send([note], rank, _NOTES).wait()
        to = Sender(group, chain[0], _CPU, transfer)
        try:
            state.send(to, [], packed, self._how)
        except BaseException:
            to.fail()
            raise
