"""FSDP2's communication for optimizers whose momentum travels instead of the gradients.

Between replicas (HSDP, `replicate`) shards of the momentum are averaged as DDP's are. In a
reduce-scatter each rank gets its own shard of the momentum, and knows that of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.hooks.fsdp import FSDPState
from pycomm.hooks.fsdp_seams import units
from pycomm.hooks.momentum import OTHERS, Find, Momenta
from pycomm.policy import Policy
from pycomm.policy.exchange import gather
from pycomm.reduction.bucket import BucketPiece
from pycomm.reduction.momentum import scaled
from pycomm.reduction.momentum.moment import CodedMoment, local

_DIVIDES = (
    "torch sums the gradients of this model and divides them by itself, so the momentum would have "
    "another unit: leave out set_gradient_divide_factor and set_force_sum_reduction_for_comms, and "
    "reduce in float32 or bfloat16"
)


class ShardedMomentumState(Momenta, FSDPState):
    """Codecs and residuals of a model in fully_shard whose coded parameters exchange momentum.

    Args:
        codec: codec or policy of the momentum.
        model: the model.
        find, unit, refresh: see `Momenta._begin_momenta`.
        options: feedback and seed; see `CompressionState`.

    Raises:
        Error: torch divides the reduced gradients in a way of its own.
    """

    goes_by_nodes = False

    def __init__(
        self,
        codec: str | Codec | Policy,
        model: nn.Module,
        *,
        find: Find,
        unit: Callable[[], float],
        refresh: int = 0,
        **options: Any,
    ) -> None:
        self._find = find
        super().__init__(codec, model, **options)
        self._begin_momenta(find, unit, refresh)

    def _enter(self, names: Sequence[str]) -> None:
        for name in names:
            tensor = self._tensor_of[name]()
            if name not in self._numbers and self._find(tensor) is None:
                self.add(name, tensor, exact=OTHERS)
        before = set(self._numbers)
        super()._enter(names)
        if hasattr(self, "moments"):  # else the constructor makes them; these were frozen
            for name in names:
                if name not in before:
                    self._make_late(name)

    def _shard_of(self, parameter: torch.Tensor) -> tuple[int, int]:
        if self._ranks == 1:
            return 0, 1
        group = self.process_group if self._scatters else self._shard_group
        assert group is not None
        return group.rank(), self._ranks

    def travel_exactly(self, names: Sequence[str], why: str) -> None:
        """See `FSDPState`: a coded parameter cannot, since its gradient is to be the momentum."""
        if not self.moments.keys().isdisjoint(names):
            raise Error(
                f"rank {self.process_group.rank()}: the momentum of {names[0]} and the rest of its "
                f"unit cannot travel coded in this step: {why}. "
                "set_reduce_scatter_unused_params(True) on the module makes missing gradients zero"
            )
        super().travel_exactly(names, why)

    # ------------------------------------------------------------------ for the optimizer

    def whole_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """See `Momenta`."""
        group = self.process_group if self._scatters else self._shard_group
        if group is not None and group.size() > 1:
            dist.all_reduce(sums, group=group)
        return sums

    def on_any_rank(self, found: bool) -> bool:
        """See `CompressionState`: a shard may be zero on one rank only."""
        found = super().on_any_rank(found)
        if self._shard_group is None:
            return found
        return any(one for (one,) in gather([found], self._shard_group, self._device))

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        # In a reduce-scatter each rank has a gradient of all rows, so it has the sums of all.
        return sums if self._scatters else self.whole_sums(sums)

    def _has_momentum(self) -> bool:
        found = any(map(_is_filled, self.moments.values()))
        verdict = torch.tensor(found, dtype=torch.uint8, device=self._device)
        for group in dict.fromkeys((self.process_group, self._shard_group)):
            if group is not None:  # a shard may be zero on one rank only
                dist.all_reduce(verdict, dist.ReduceOp.MAX, group=group)
        return bool(verdict)

    # ------------------------------------------------------------------ exchanges

    def _sent_before(self, piece: BucketPiece, shard: int | None = None) -> torch.Tensor | None:
        if shard is not None:  # the momentum of other shards is unknown
            return self._own_of(piece).stored_worker(shard)
        return super()._sent_before(piece)

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> Callable[[], None]:
        """See `BucketReducer`; this rank gets its shards of the momentum."""
        rows = input.view(self._ranks, -1)
        parts = self._parts(tuple(names), rows)
        if parts and not average:
            raise Error(f"rank {self.process_group.rank()}: {_DIVIDES}")
        scaled.encode(self._encodings(parts, range(self._ranks)))
        wait = super().scatter(output, input, names, group, average=average)

        def finish() -> None:
            wait()
            self._finish(parts, output)

        return finish

    def _finish(
        self, parts: Sequence[tuple[CodedMoment, torch.Tensor, BucketPiece]], output: torch.Tensor
    ) -> None:
        """Keep what was sent, and make momentum of the own shards."""
        scaled.store_sent(
            [
                moment.sent(part[r], piece.residual, self._own_of(piece), r)
                for moment, part, piece in parts
                for r in range(self._ranks)
            ]
        )
        places = [output[p.offset : p.offset + p.numel] for _, _, p in parts]
        self._land([(moment, place) for (moment, _, _), place in zip(parts, places, strict=True)])


def _is_filled(moment: CodedMoment) -> bool:
    gradient = moment.parameter.grad
    return gradient is not None and bool(local(gradient).any())


def check_averages(model: nn.Module) -> list[dist.ProcessGroup]:
    """Check that torch averages the gradients; return the groups of ranks that it averages over.

    Raises:
        Error: torch divides the gradients by something else, or sums them.
        ValueError: a parameter is sharded by another dimension than the first.
    """
    groups: dict[dist.ProcessGroup, None] = {}
    for unit in units(model):
        group = unit.group
        if (
            group.gradient_divide_factor is not None
            or group.force_sum_reduction_for_comms
            or torch.float16 in unit.reduced_in()
        ):
            raise Error(_DIVIDES)
        for name, parameter in unit.parameters.items():
            if parameter.fsdp_placement.dim != 0 and parameter.sharded_param.ndim > 1:
                raise ValueError(
                    f"CodedAdamW: {name} is sharded by dimension {parameter.fsdp_placement.dim}, "
                    "and its momentum travels by rows: leave out shard_placement_fn"
                )
        if isinstance(group.mesh_info, DDPMeshInfo):
            groups[group.mesh_info.replicate_process_group] = None
        if isinstance(group.mesh_info, FSDPMeshInfo):
            groups[group.mesh_info.shard_process_group] = None
    return list(groups)
