"""The momenta of a model in FSDP2.

Between replicas (HSDP, `replicate`) shards of the momentum are averaged as DDP's are. In a
reduce-scatter each rank gets its own shard of the momentum, and knows that of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from pycomm.errors import Error
from pycomm.hooks.fsdp_seams import units
from pycomm.hooks.momentum import Momenta
from pycomm.momentum.job import Job
from pycomm.momentum.moment import CodedMoment, local
from pycomm.reduction.refusals import MOMENTA, refused


class ShardedMomenta(Momenta):
    """The momenta of a model in fully_shard or replicate; arguments as for `Momenta`."""

    by_nodes = False

    def _shard(self) -> tuple[int, int]:
        group = self.reducer.layout.shard_group
        return (0, 1) if group is None else (group.rank(), group.size())

    def check_exact(self, names: Sequence[str], why: str) -> None:
        """Check that the gradients of some parameters can travel exactly in this step.

        Raises:
            Error: one is coded, whose gradient is to be the momentum.
        """
        if not self.moments.keys().isdisjoint(names):
            raise Error(
                f"rank {self.state.process_group.rank()}: the momentum of {names[0]} and the rest "
                f"of its unit cannot travel coded in this step: {why}. "
                "set_reduce_scatter_unused_params(True) on the module makes missing gradients zero"
            )

    # ------------------------------------------------------------------ for the optimizer

    def check_reduced(self, name: str, parameter: torch.Tensor) -> None:
        """See `Momenta`: FSDP2 averages all gradients."""

    def whole_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """See `Momenta`."""
        if self.reducer.layout.shard_group is not None:
            dist.all_reduce(sums, group=self.reducer.layout.shard_group)
        return sums

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        # In a reduce-scatter each rank has a gradient of all rows, so it has the sums of all.
        return sums if self.reducer.layout.rows > 1 else self.whole_sums(sums)

    def _has_momentum(self) -> bool:
        return self.state.on_any_rank(any(map(_is_filled, self.moments.values())))

    # ------------------------------------------------------------------ exchanges

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
    ) -> Callable[[], None]:
        """See `BucketReducer.scatter`; this rank gets its shards of the momentum."""
        bucket = self.reducer.bucket_of(tuple(names), input.device)
        table = bucket.moments
        if table is None or not table.is_current:
            table = bucket.moments = self._table_of(bucket)
        if not table.parts:
            return self.reducer.scatter(output, input, names, group, average=average)
        if not average:
            why = refused(MOMENTA, "sums of torch")
            raise Error(f"rank {self.state.process_group.rank()}: {why}")
        job = Job(
            *(self._passes, table, input),
            unit=self._scale,
            ranks=self.state.process_group.size(),
            looks=self._exchanges_sums,
            divides=self._kind.divides,
        )
        job.encode(scale=self._scale_on)
        wait = self.reducer.scatter(output, input, names, group, average=average)

        def finish() -> None:
            wait()
            job.sent()
            job.land(output)

        return finish


def _is_filled(moment: CodedMoment) -> bool:
    gradient = moment.parameter.grad
    return gradient is not None and bool(local(gradient).any())


def check_averages(model: nn.Module, who: str) -> list[dist.ProcessGroup]:
    """Check that torch averages the gradients; return the groups of ranks that it averages over.

    Args:
        model: the model.
        who: name of its optimizer.

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
            raise Error(refused(MOMENTA, "sums of torch"))
        for name, parameter in unit.parameters.items():
            if parameter.fsdp_placement.dim != 0 and parameter.sharded_param.ndim > 1:
                where = {"name": name, "dim": parameter.fsdp_placement.dim}
                raise ValueError(f"{who}: {refused(MOMENTA, 'shards that are not rows', **where)}")
        if isinstance(group.mesh_info, DDPMeshInfo):
            groups[group.mesh_info.replicate_process_group] = None
        if isinstance(group.mesh_info, FSDPMeshInfo):
            groups[group.mesh_info.shard_process_group] = None
    return list(groups)
