"""Communication of FSDP2 (`torch.distributed.fsdp.fully_shard`), compressed.

What crosses the slow link decides what is compressed:

* FSDP: gradients are reduce-scattered. Each rank encodes, with feedback, the shard of every
  parameter for its owner, which decodes, adds and keeps float32: one coding, nothing is sent back.
* HSDP: inside a replica the reduce-scatter stays exact, since that is where links are fast; the
  all-reduce of the shards between replicas is compressed, with feedback, as a bucket of DDP's is.
* `replicate()`: the all-reduce between replicas, of whole parameters.
* Weights are all-gathered exactly unless a codec for them is named: no feedback corrects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Cut
from pycomm.hooks import two_shot
from pycomm.hooks.bucket import Bucket
from pycomm.hooks.fsdp_seams import (
    CompressedAllGather,
    CompressedReduceScatter,
    ReplicaHook,
    Unit,
    leave_replicas_to_the_hook,
    units,
)
from pycomm.hooks.state import CompressionState
from pycomm.policy import Decision, Policy, agree_on_options, summary
from pycomm.policy import agree as agree_on


class FSDPState(CompressionState):
    """Codecs and feedback of a model's shards; and the model's communication uses it from now on.

    Args:
        codec: of gradients, as `CompressionState` has it. Rules see whole parameters, not shards.
        model: a model in which fully_shard or replicate has wrapped modules.
        weights: codec or policy of the parameters when they are gathered; None: exactly.
        options: feedback and seed, as `CompressionState` has them.

    Raises:
        Error: parts of the model are reduced in different groups, or are compressed already.
        ValueError: a codec whose payloads cannot be reduce-scattered.
        WireMismatch: ranks have different models or codecs.
    """

    def __init__(
        self,
        codec: str | Codec | Policy,
        model: nn.Module,
        *,
        weights: str | Codec | Policy | None = None,
        **options: Any,
    ) -> None:
        self._units = list(units(model))
        info = _mesh_info(self._units)
        self._scatters = not isinstance(info, DDPMeshInfo)
        group = info.shard_process_group if self._scatters else info.replicate_process_group
        super().__init__(codec, process_group=group, **options)
        self._ranks = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
        self._shard_group = info.shard_process_group if self._ranks > 1 else None
        self._shards: dict[str, torch.Size] = {}  # by name: what a rank has of it, with padding
        self._rows: set[str] = set()  # that ranks share by rows of their first dimension
        self._backward: int | None = None  # number of the one that is running
        self._reduced: set[str] = set()  # in this step
        self._waits: list[Callable[[], object]] = []  # for what is under way
        for unit in self._units:
            for name, parameter in unit.parameters.items():
                if name in self._shards:
                    raise Error(f"the model has two parameters of the name {name}")
                self.add(name, parameter.sharded_param)
                self._shards[name] = parameter.padded_sharded_param_size
                if parameter.fsdp_placement.dim == 0:
                    self._rows.add(name)
        self._refuse_factors()
        self.agree()
        self.weights: dict[str, Decision] = {}
        """The codec of each parameter's weights, by name; none: exactly."""
        self._weight_buckets: dict[tuple[str, ...], Bucket] = {}
        policy = None if weights is None else Policy.of(weights)
        terms = [f"weights: {term}" for term in (policy.terms() if policy else ["exactly"])]
        # Shards gather the weights, and replicas compute with the same. Gradients are one model's,
        # but each shard's replicas have compared their terms among themselves alone.
        terms += [f"gradients: {term}" for term in self.plan.terms]
        groups = [g for g in (self._shard_group, self.process_group) if g is not None]
        agree_on_options(terms, *dict.fromkeys(groups))
        if policy is not None:
            self.weights = {n: policy.decide(d.parameter) for n, d in self.decisions.items()}
            agree_on(list(self.weights.values()), self.process_group, self._device)
        for unit in self._units:
            self._install(unit)

    def _refuse_factors(self) -> None:
        for decision in self.decisions.values():
            if self._scatters and decision.codec.combine == "factors":
                raise ValueError(
                    f"{decision.codec.name} averages whole matrices, and FSDP2 has shards of them "
                    "at different ranks: take another codec, or HSDP, where it works on shards"
                )

    def _install(self, unit: Unit) -> None:
        if self._scatters:
            unit.module.set_custom_reduce_scatter(CompressedReduceScatter(self, unit))
        else:
            leave_replicas_to_the_hook(unit.group)
            unit.module.set_all_reduce_hook(ReplicaHook(self, unit))
        if self.weights and self._ranks > 1:
            unit.module.set_custom_all_gather(CompressedAllGather(self, unit))

    def summary(self) -> str:
        """Return the decisions of gradients and weights, a line for each codec and reason."""
        lines = summary(self.weights.values()).splitlines()
        return "\n".join([super().summary(), *(f"weights: {line}" for line in lines)])

    # ------------------------------------------------------------------ steps

    def enter(self, names: Sequence[str]) -> None:
        """Begin a step if these parameters are the first of a backward, or come once more in it."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward and self._reduced.isdisjoint(names):
            self._reduced.update(names)
            return
        if backward == self._backward:
            self.end_step()
        else:
            # Runs when all of this backward has run, as torch's own hooks do it.
            torch.autograd.Variable._execution_engine.queue_callback(self._leave)
        self._backward, self._reduced = backward, set(names)
        self._waits.clear()
        self.begin_step()

    def _leave(self) -> None:
        self.end_step()
        self._backward = None

    def end_step(self) -> None:
        """Wait for all of this step; with HSDP the shards agree on a verdict."""
        super().end_step()
        for wait in self._waits:
            wait()
        self._waits.clear()
        if self._scatters or self._shard_group is None:
            return
        finite = all([check() for check in self._finite])
        verdict = torch.tensor(finite, dtype=torch.uint8, device=self._device)
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=self._shard_group)
        self._finite = [lambda: bool(verdict)]

    # ------------------------------------------------------------------ exchanges

    def expects(self, names: Sequence[str]) -> int:
        """Return how many values one rank has of the named parameters, with padding."""
        return sum(self._shards[name].numel() for name in names)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        average: bool,
        later: bool = False,
    ) -> None:
        """Sum or average what ranks have for each other.

        Args:
            output: floats of 16 or 32 bits [values]; what this rank has of the named parameters.
            input: the same for every rank [ranks * values].
            names: as they lie in it.
            group: where to reduce.
            average: divide by the number of ranks.
            later: the result need not be there before backward ends.
        """
        self.enter(names)
        bucket = self._bucket(tuple(names), input.device)
        self._use(bucket.pieces, bucket, input)
        probe = self.plan.probe(input, bucket.pieces, self._owed, rows=self._ranks, average=average)
        native = bucket.taken_by(group, "reduce_scatter", output)
        if native is not None:
            work = native.compressed_reduce_scatter(
                output, input, bucket.native, bucket.sides, self.seed, self.step, average
            )
            self._finite.append(lambda: work.finite)
            if later:
                self._waits.append(work.wait)
                if probe is not None:
                    self._waits.append(lambda: probe.finish(output))
            else:
                work.wait()
                if probe is not None:
                    probe.finish(output)
            return
        finite = two_shot.reduce_scatter(
            output,
            input,
            bucket,
            group,
            seed=self.seed,
            step=self.step,
            average=average,
        )
        self._finite.append(lambda: bool(finite))
        if probe is not None:
            probe.finish(output)

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        names: Sequence[str],
        group: dist.ProcessGroup,
    ) -> dist.Work | None:
        """Gather weights, encoded; the work is None if that is done.

        Args:
            output: floats of 16 or 32 bits [ranks * values].
            input: of the same type [values]: what this rank has of the named parameters.
            names: as they lie in it.
            group: where to gather.
        """
        key = tuple(names)
        bucket = self._weight_buckets.get(key)
        if bucket is None:
            decisions = [self.part(self.weights[name]) for name in key]
            numbers = [self._numbers[name] for name in key]
            bucket = self._weight_buckets[key] = Bucket(decisions, numbers, None, input.device)
        native = bucket.taken_by(group, "all_gather", output)
        if native is not None:
            work: dist.Work = native.compressed_all_gather(
                output, input, bucket.native, bucket.sides, self.seed, self.step
            )
            return work
        two_shot.all_gather(output, input, bucket, group, seed=self.seed, step=self.step)
        return None

    def all_reduce(
        self, tensor: torch.Tensor, names: Sequence[str], *, later: bool = False
    ) -> None:
        """Average shards over the replicas, in place; `later` as of `reduce_scatter`."""
        self.enter(names)
        future = self.reduce(tensor, names)
        if later:
            self._waits.append(future.wait)
        else:
            self._exchanges.finish()
            future.wait()

    def _cuts(self) -> dict[str, Cut]:
        if not self._scatters:
            return {}
        shapes = {name: self.decisions[name].parameter.shape for name in self._rows}
        return {name: Cut(tuple(shape), self._ranks) for name, shape in shapes.items()}

    @property
    def rows(self) -> int:
        """A rank has a part of each parameter for every owner, or one for its other replicas."""
        return self._ranks if self._scatters else 1

    def part(self, decision: Decision) -> Decision:
        """Return the decision for one rank's shard of a parameter, padded."""
        shape = tuple(self._shards[decision.parameter.name])
        parameter = replace(decision.parameter, shape=shape)
        return replace(decision, parameter=parameter, codec=decision.codec.fit(shape))


def _mesh_info(found: Sequence[Unit]) -> Any:
    """The mesh that all parts of the model share."""
    infos = [unit.group.mesh_info for unit in found]
    if any(info != infos[0] for info in infos):
        raise Error(
            "parts of this model are reduced in different groups of ranks: compress each part by "
            "itself, pycomm.compress(part, ...), before anything else has run"
        )
    for unit in found:
        comms = (unit.group._reduce_scatter_comm, unit.group._all_reduce_hook)
        if any(isinstance(comm, (CompressedReduceScatter, ReplicaHook)) for comm in comms):
            raise Error("this model, or a part of it, is compressed already")
    return infos[0]
