"""Paths of compressed collectives: which code reduces a bucket, and why not a faster one.

A path is chosen once for a bucket and an operation, by asking: what a path takes stands in the
table `PATHS`, and what a group offers is answered by its backend. Ranks agree on the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from pycomm import backend
from pycomm.codecs import CODECS
from pycomm.codecs.implementations import Native, select
from pycomm.env import env
from pycomm.log import ignore, logger
from pycomm.policy.exchange import gather
from pycomm.reduction.bucket import Bucket

if TYPE_CHECKING:
    from pycomm._c10d import Backend

KINDS = ("residual", "decay", "momentum")


def _core(bucket: Bucket, group: dist.ProcessGroup, device: torch.device) -> str:
    if backend.find(group, device):
        return ""
    return f"the group's backend for {device.type} is not pycomm"


def _peers(bucket: Bucket, group: dist.ProcessGroup, device: torch.device) -> str:
    native = backend.find(group, device)
    if native is None:
        return _core(bucket, group, device)
    if why := native.why_no_peers(device):
        return why
    if bucket.levels:
        return "it goes by nodes"
    most = native.most_payload_bytes(device)
    for piece in bucket.pieces:
        payload = piece.codec.encoded_bytes(piece.numel)
        if piece.codec.granule == 0 and payload > most:
            return (
                f"{piece.name} has a payload of {payload} bytes that cannot be cut, and at most "
                f"{most} fit in the memory that ranks share"
            )
    return ""


def _batched(bucket: Bucket, group: dist.ProcessGroup, device: torch.device) -> str:
    ways = {piece.codec.name: piece.codec.implementation("cpu") for piece in bucket.pieces}
    other = sorted(name for name, way in ways.items() if not isinstance(way, Native))
    if other:
        return f"{', '.join(other)} is coded by another implementation"
    if not isinstance(select("convert", "cpu"), Native):
        return "results are converted by another implementation"
    return ""


def _kernels(bucket: Bucket, group: dist.ProcessGroup, device: torch.device) -> str:
    codecs = {piece.codec.name: piece.codec for piece in bucket.pieces}
    ways = {name: codec.implementation(device.type) for name, codec in codecs.items()}
    other = sorted(name for name, way in ways.items() if not isinstance(way, Native))
    if other:
        return f"{', '.join(other)} on {device.type} is coded by another implementation"
    if len({type(way) for way in ways.values()}) > 1:
        return f"{', '.join(ways)} on {device.type} are coded by several implementations"
    return ""


@dataclass(frozen=True)
class Path:
    """A path, and what it takes: any storage of residuals, and floats of 16 and 32 bits."""

    name: str
    about: str
    on: Literal["cpu", "gpu", "any"] = "any"
    """Where the values are; "gpu": on any device but the CPU."""
    in_core: bool = False
    """The backend runs the operation, by `Backend.compressed_all_reduce` and the like."""
    needs: Callable[[Bucket, dist.ProcessGroup, torch.device], str] = lambda *_: ""
    """What else it needs: returns what is missing, or "". Collective, as `choose` is."""
    codecs: tuple[str, ...] | None = None
    """Names of codecs; None: all, with those that users have registered."""
    kinds: tuple[str, ...] = KINDS
    senders: bool = False
    """It can average a value over the ranks that have sent it."""
    decides: bool = False
    """Kernels tell each other whether a step is finite; see `SideStream`."""

    def refusal(self, bucket: Bucket, *, senders: bool = False) -> str:
        """Return which column of the table excludes a bucket; "" if none does."""
        for piece in bucket.pieces:
            if self.codecs is not None and piece.codec.name not in self.codecs:
                return f"it takes no codec {piece.codec.name}"
            if piece.residual is not None and piece.residual.rule.kind not in self.kinds:
                return f"it takes no feedback {piece.residual.rule.kind}"
        if senders and not self.senders:
            return "it averages over all ranks, not over those that have sent"
        return ""


_NATIVE = tuple(CODECS)
CORE = Path(
    "core",
    "coded and exchanged by segments in C++",
    "cpu",
    in_core=True,
    needs=_core,
    codecs=_NATIVE,
)
PEERS = Path(
    "peers",
    "coded by kernels that read the memory of the peers' GPUs",
    "gpu",
    in_core=True,
    needs=_peers,
    codecs=_NATIVE,
    kinds=("residual", "decay"),
)
BATCHED = Path(
    "batched",
    "coded in C++, payloads by the group's all-to-all and all-gather",
    "cpu",
    needs=_batched,
    codecs=_NATIVE,
)
KERNELS = Path(
    "kernels",
    "coded by kernels on a stream beside backward, payloads by the group's all-to-all and "
    "all-gather",
    "gpu",
    needs=_kernels,
    codecs=tuple(name for name in CODECS if name != "lossless"),
    kinds=("residual", "decay"),
    decides=True,
)
"""Not of payloads whose size varies, which the host would have to read before they are sent."""
PAYLOADS = Path(
    "payloads",
    "coded one run at a time, payloads by the group's all-to-all and all-gather",
    senders=True,
)
PATHS = (CORE, PEERS, KERNELS, BATCHED, PAYLOADS)
"""The capability table, from the fastest path on."""

SINGLE = Path("single", "coded once, payloads by the group's all-gather or all-to-all")
"""Of the coded optimizers, which choose it themselves."""
SINGLE_KERNELS = Path(
    "single",
    "coded once by kernels on a stream beside backward, payloads by the group's all-gather or "
    "all-to-all",
    decides=True,
)


@dataclass(frozen=True)
class ChosenPath:
    """The path of a bucket in an operation."""

    path: Path
    why: str = ""
    """Why it is not a faster one; "" if there is none."""
    native: Backend | None = field(default=None, compare=False)
    """The backend that runs the operation; None: the payloads are exchanged."""

    def __str__(self) -> str:
        return f"{self.path.name} ({self.path.about})" + (f"; not {self.why}" if self.why else "")


def choose(
    bucket: Bucket, group: dist.ProcessGroup, tensor: torch.Tensor, *, senders: bool = False
) -> ChosenPath:
    """Return the first path of the table that takes a bucket; all ranks call it together.

    Args:
        bucket: the bucket, with its residuals.
        group: the group that reduces or gathers.
        tensor: the values; always of one dtype and device.
        senders: values are averaged over the ranks that have sent them.
    """
    where = "cpu" if tensor.is_cpu else "gpu"
    refused: list[str] = []
    for path in PATHS:
        if path.on not in (where, "any"):
            continue
        refusal = path.refusal(bucket, senders=senders)
        refusal = refusal or path.needs(bucket, group, tensor.device)
        if not refusal:
            native = backend.find(group, tensor.device) if path.in_core else None
            return ChosenPath(path, "; ".join(refused), native)
        refused.append(f"{path.name}: {refusal}")
    raise AssertionError("the last path takes every bucket: " + "; ".join(refused))


def chosen(
    bucket: Bucket,
    group: dist.ProcessGroup,
    op: str,
    tensor: torch.Tensor,
    *,
    senders: bool = False,
) -> ChosenPath:
    """Return the path of a bucket, which the first call for it and an operation chooses and logs.

    Where kernels of a device reduce, it is the slowest that a rank has chosen: residuals differ
    between ranks after a member has joined, and with them what a path takes.

    Args:
        op: "all_reduce" or "reduce_scatter".
        bucket, group, tensor, senders: as for `choose`; all ranks call it together.
    """
    choice: ChosenPath | None = bucket.paths.get((op, senders))
    if choice is None:
        choice = choose(bucket, group, tensor, senders=senders)
        if not tensor.is_cpu and backend.find(group, tensor.device):
            ours = PATHS.index(choice.path)
            last = max(int(place) for (place,) in gather([ours], group, tensor.device))
            if last != ours:
                why = f"{choice.path.name}: a residual of another rank rules it out"
                choice = ChosenPath(PATHS[last], why)
        bucket.paths[op, senders] = choice
        if group.rank() == 0:
            if choice.path.in_core and env().impl != "native":
                ignore((), ("codecs",), str(choice))
            first = bucket.pieces[0].name if bucket.pieces else "none"
            logger.info(
                "%s of the bucket of %s, %d parameters of %d values: %s",
                *(op, first, len(bucket.pieces), bucket.numel, choice),
            )
    return choice


def summary(buckets: Iterable[Bucket]) -> str:
    """Return the paths of buckets, a line for each path and reason."""
    found: dict[tuple[str, str], list[int]] = {}
    for bucket in buckets:
        for (op, _), choice in bucket.paths.items():
            found.setdefault((op, str(choice)), []).append(bucket.numel)
    return "\n".join(
        f"path of {op}, {len(sizes)} bucket{'s' * (len(sizes) > 1)} of {sum(sizes)} values: {text}"
        for (op, text), sizes in found.items()
    )
