"""FSDP2's communication for optimizers whose momentum travels instead of the gradients.

Between replicas (HSDP, `replicate`) shards of the momentum are averaged as DDP's are. In a
reduce-scatter each rank gets its own shard, and knows the momentum of no other. There each rank
keeps what itself has sent, o, in the momentum's place:

    p = (b o + (1 - b) g) / d + e;  q = C(p);  e <- p - q;  o <- d q;  m <- d mean(q), of the shard

The ranks' mean of o is m, so the mean of p follows the same formula as in DDP; if all ranks have
the same gradients, so does each p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Residuals
from pycomm.hooks.fsdp import FSDPState
from pycomm.hooks.fsdp_seams import units
from pycomm.hooks.momentum import Find, Momenta
from pycomm.policy import Policy
from pycomm.reduction.bucket import Piece
from pycomm.reduction.moment import CodedMoment, local
from pycomm.reduction.saved import known, residuals_of

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
        self.own: Residuals | None = None
        """What this rank has sent of the momentum of all shards; None: ranks know the momentum."""
        if self._scatters:
            assert self.residuals is not None
            self.own = Residuals(self.residuals.rule, self.process_group.size())
        self._begin_momenta(find, unit, refresh)

    def _enter(self, names: Sequence[str]) -> None:
        for name in names:
            tensor = self._tensor_of[name]()
            if name not in self._numbers and self._find(tensor) is None:
                self.add(name, tensor, exact="another optimizer has it")
        before = set(self._numbers)
        super()._enter(names)
        if hasattr(self, "moments"):  # else the constructor makes them; these were frozen
            for name in names:
                if name not in before:
                    self._make_moment(name)

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

    @property
    def kept_alike(self) -> int:
        """See `BucketReducer`: what was sent is kept beside the residuals."""
        return 2 if self._scatters else 1

    # ------------------------------------------------------------------ for the optimizer

    def whole_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """See `Momenta`."""
        group = self.process_group if self._scatters else self._shard_group
        if group is not None and group.size() > 1:
            dist.all_reduce(sums, group=group)
        return sums

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        # In a reduce-scatter each rank has a gradient of all rows, so it has the sums of all.
        return sums if self._scatters else self.whole_sums(sums)

    def take_sums(self) -> None:
        """See `Momenta`: also keeps what was sent for the momentum that is used now."""
        if self.own is not None and self._pending:
            self.own.commit(self._touched_moments, self.step)
        super().take_sums()

    def _kept(self) -> set[str]:
        moments = self.moments.items()
        found = torch.tensor([_nonzero(moment) for _, moment in moments], dtype=torch.uint8)
        found = found.to(self._device)
        if found.numel():  # a shard may be zero on one rank only
            for group in dict.fromkeys((self.process_group, self._shard_group)):
                if group is not None:
                    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return {name for (name, _), one in zip(moments, found.tolist(), strict=True) if one}

    # ------------------------------------------------------------------ exchanges

    def _scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
        later: bool,
    ) -> None:
        rows = input.view(self._ranks, -1)
        parts = self._parts(tuple(names), rows)
        if parts and not average:
            raise Error(f"rank {self.process_group.rank()}: {_DIVIDES}")
        new = [(moment, part) for moment, part, _ in parts if not moment.has_scale]
        for moment, part in new:
            for r in range(self._ranks):
                moment.enter(part[r], self._scale, r)
        self._share_scales([moment for moment, _ in new])
        entered, looks = {id(moment) for moment, _ in new}, self._exchanges_sums
        for moment, part, piece in parts:
            known_ = id(moment) in entered
            for r in range(self._ranks):
                sent = None if moment.again else self._sent_before(piece, r)
                moment.encode(
                    *(part[r], self._scale, piece.residual, sent, r), entered=known_, looks=looks
                )
        super()._scatter(output, input, names, group, average=average, later=later)
        finish = partial(self._finish, parts, output)
        if later:
            self._waits.append(finish)
        else:
            finish()

    def _finish(
        self, parts: Sequence[tuple[CodedMoment, torch.Tensor, Piece]], output: torch.Tensor
    ) -> None:
        """Keep what was sent, and make momentum of the own shards."""
        for moment, part, piece in parts:
            own = self._own_of(piece)
            for r in range(self._ranks):
                sent = moment.sent(part[r], piece.residual, r)
                if moment.again:
                    sent += own.written_worker(r)
                own.store_worker(sent, r)
            moment.decode(output[piece.offset : piece.offset + piece.numel], self._scale)

    def _own_of(self, piece: Piece) -> Any:
        assert self.own is not None
        return self.own.get(
            piece.name, piece.numel, self._device, rows=self._ranks, codec=piece.codec
        )

    def _sent_before(self, piece: Piece, row: int) -> torch.Tensor:
        sent: torch.Tensor = self._own_of(piece).load_worker(row)
        return sent

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `CompressionState`; also has what this rank has sent of the momentum."""
        state = super().state_dict()
        if self.own is not None:
            state[f"own{dist.get_rank()}"] = (self.step, self.own.state_dict())
        return state

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """See `CompressionState`."""
        super().load_state_dict(*states)
        if self.own is None:
            return
        saved = {key: value for state in states for key, value in state.items()}
        (about,) = saved["about"]
        before = about["world_size"]
        keys = self._needed_besides(self._needed(before))
        if not all(key in saved for key in keys):
            return  # the state of a model that was not sharded: every rank begins with nothing
        own = [residuals_of(saved, key, about["step"], keeps=True) for key in keys]
        own = known(own, self._numbers, tell=False)
        self.own.load_state_dict(self._mine(own, before), self.codecs)

    def _needed_besides(self, needed: Sequence[str]) -> list[str]:
        return [key.replace("rank", "own") for key in needed] if self.own is not None else []


def _nonzero(moment: CodedMoment) -> bool:
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
