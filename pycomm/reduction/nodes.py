"""Collectives by nodes: exact in a node, coded between nodes.

The ranks of a node share a network card. A flat all-reduce of L ranks a node sends a node's card L
payloads; here each rank of a node codes its part of the node's sum, and the card sends one. The
algorithm, cuts and numbers are those of ``by_nodes`` in csrc/collectives/coded/coded.cpp, on
any process groups: where a node has two ranks, results are equal bit for bit. (The order in which a
group sums more of them is its own.)
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm import backend
from pycomm.codecs.convert import convert
from pycomm.env import host
from pycomm.policy.exchange import gather_json
from pycomm.reduction import own_group, two_shot
from pycomm.reduction.bucket import Bucket, BucketPiece
from pycomm.reduction.coding import Run, chunks, rows_plan, whole


class Nodes:
    """The ranks of a group by their nodes, and the groups in which they exchange.

    Collective. A rank's group of its node and its group of the ranks at the same place of the other
    nodes are made here, and closed with this object. They are used one after the other by the
    thread that reduces, on a device on one stream.

    Args:
        group: the ranks that reduce.
        levels: number of the node of each rank, equally many of each; see `find_levels`.
        device: where the values are.
    """

    def __init__(
        self, group: dist.ProcessGroup, levels: Sequence[int], device: torch.device
    ) -> None:
        self.levels = tuple(levels)
        self._ranks = len(levels)
        nodes = [[r for r, n in enumerate(levels) if n == node] for node in sorted(set(levels))]
        ours = next(node for node in nodes if group.rank() in node)
        self._place = ours.index(group.rank())
        self._shards = len(ours)
        """Parts of a bucket: each rank of a node has one."""
        rails = [sorted(rail) for rail in zip(*nodes, strict=True)]
        across = rails[self._place]
        self._numbers = tuple(across)  # of the ranks at our place, as theirs in that group
        # The rank of each row, by place, then by node.
        self._by_place = torch.tensor(rails, dtype=torch.int64, device=device).view(-1)
        # With "cpu:pycomm,cuda:nccl" a node has NCCL, whose sockets between hosts are slower than
        # pycomm's.
        mixed = backend.find(group) is not None and backend.find(group, device) is None
        carrier = f"cpu:pycomm,{device.type}:pycomm" if mixed else None
        self._node = own_group.make(group, ours)
        self._across = own_group.make(group, across, backend=carrier)
        for made in (self._node, self._across):
            weakref.finalize(self, own_group.close, made).atexit = False

    def __str__(self) -> str:
        count = self._ranks // self._shards
        return f"{count} nodes of {self._shards} ranks: exact in a node, coded between nodes"

    def all_reduce(
        self,
        values: torch.Tensor,
        bucket: Bucket,
        *,
        found_inf: torch.Tensor,
        **options: Any,
    ) -> None:
        """Average values over all ranks; see `two_shot.all_reduce`, which this has the results of.

        Args:
            values: floats of 16 or 32 bits [bucket.numel], contiguous; holds the result afterwards.
            bucket: made with ``levels=self.levels``.
            found_inf, options: as for `two_shot.all_reduce`.
        """
        parts = bucket.parts = bucket.parts or self._parts(bucket.pieces)
        places = [values[_begin(runs) : _end(runs)] for runs in parts]
        sums = values
        if values.dtype != torch.float32:
            sums = torch.empty_like(values, dtype=torch.float32)
        runs = parts[self._place]
        ours, place = sums[_begin(runs) : _end(runs)], places[self._place]
        ours.copy_(self._sum_in_node(places, values)[: ours.numel()])
        options |= {"part": (runs, self._ranks), "found_inf": found_inf}
        two_shot.all_reduce(sums, bucket, self._across, **options)
        if place.dtype != torch.float32:
            convert(ours, place, found_inf=found_inf)
        self._gather_in_node(places, found_inf)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        bucket: Bucket,
        *,
        found_inf: torch.Tensor,
        average: bool,
        **options: Any,
    ) -> None:
        """Sum or average rows; see `two_shot.reduce_scatter`.

        A node sums all rows exactly, each rank those for the ranks at its place of all nodes, and
        codes the sums for these.

        Args:
            output, input, found_inf, average, options: as there.
            bucket: made with ``levels=self.levels`` and a row for each rank.
        """
        every = input.view(self._ranks, -1)[self._by_place].to(torch.float32)
        rows = every.new_empty(len(self._numbers), every.shape[1])
        dist.reduce_scatter_tensor(rows.view(-1), every.view(-1), group=self._node)
        wide = output.dtype == torch.float32
        result = output if wide else torch.empty_like(output, dtype=torch.float32)
        two_shot.exchange(
            "reduce_scatter",
            lambda: rows_plan(bucket.pieces, self._numbers),
            result,
            rows,
            bucket,
            self._across,
            divisor=self._ranks if average else 1,
            found_inf=found_inf,
            **options,
        )
        if not wide:
            convert(result, output, found_inf=found_inf)

    def part_of(self, pieces: Sequence[BucketPiece]) -> tuple[int, int, Sequence[Run]]:
        """Return our number among the ranks that code the same part, theirs, and the part.

        Args:
            pieces: those of a bucket that is all-reduced.
        """
        return self._across.rank(), self._across.size(), self._parts(pieces)[self._place]

    def check(self, device: torch.device) -> None:
        """Raise the error of an operation on device tensors in one of the groups; see
        `BucketReducer.check_operations`."""
        for group in (self._node, self._across):
            ours = backend.find(group, device)
            if ours is not None:
                ours.check()

    def _parts(self, pieces: Sequence[BucketPiece]) -> list[list[Run]]:
        """Return the runs of each rank of a node that has a part."""
        return chunks(whole(pieces), self._shards)

    def _sum_in_node(self, places: Sequence[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        """Return the node's sum of our part, rounded in float32; values behind it mean nothing.

        Args:
            places: the values of each part.
            values: all values.
        """
        most, ranks = max(place.numel() for place in places), self._node.size()
        rows = values.new_empty(ranks, most, dtype=torch.float32)
        parts = [rows[i, : place.numel()] for i, place in enumerate(places)]
        torch._foreach_copy_(parts, list(places))  # on a device in one launch
        ours = rows.new_empty(most)
        dist.reduce_scatter_tensor(ours, rows.view(-1), group=self._node)
        return ours

    def _gather_in_node(self, places: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
        """Let each rank of the node have all parts, and the flag of that which is not finite."""
        most = max(place.numel() for place in places)
        row = places[0].new_empty(most + 1)  # our part, and whether it is not finite
        row[: places[self._place].numel()].copy_(places[self._place])
        row[most:].copy_(found_inf)
        rows = row.new_empty(self._node.size(), most + 1)
        self._node._allgather_base(rows.view(-1), row).wait()
        parts = [rows[i, : place.numel()] for i, place in enumerate(places)]
        torch._foreach_copy_(list(places), parts)
        # Other buckets of the step may set the flag meanwhile.
        found_inf.masked_fill_(rows[:, most].amax(0, keepdim=True) != 0, 1.0)


def find_levels(group: dist.ProcessGroup, device: torch.device) -> list[int] | None:
    """Return the number of each rank's node; None: a flat all-reduce sends as little; collective.

    A node is the ranks with one PYCOMM_HOST_ID, else with one hostname, on one boot of a machine.
    Nodes are numbered by their lowest ranks. With PYCOMM_ALGO=flat there are none.

    Args:
        group: the ranks that reduce.
        device: a device whose tensors the group moves.
    """
    from pycomm import _C

    options = _C.env()
    name = f"{host()}/{options['host_id'] or socket.gethostname()}"
    said = gather_json([name, options["algo"] == "flat"], group, device)
    names = [name for name, _ in said]
    levels = [list(dict.fromkeys(names)).index(name) for name in names]
    if any(flat for _, flat in said) or not 1 < max(levels) + 1 < group.size():
        return None
    return levels


def _begin(runs: Sequence[Run]) -> int:
    return runs[0].piece.offset + runs[0].begin if runs else 0


def _end(runs: Sequence[Run]) -> int:
    return runs[-1].piece.offset + runs[-1].end if runs else 0
