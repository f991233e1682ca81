"""What each rank has sent of the momenta of `CodedSGD`, whose step exchanges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pycomm.reduction.reducer import BucketReducer, average, completed
from pycomm.reduction.state import CompressionState
from pycomm.reduction.transform import Future, Transform

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class SentMomenta(Transform):
    """What this rank has sent of the momenta that a step exchanges.

    Each rank keeps the gradients of its own data for the optimizer's parameters. Those of other
    parameters are averaged exactly, as DDP does.
    """

    state: CompressionState
    reducer: BucketReducer

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}
        """Residuals before the last coding as they are stored, where that has overwritten them."""
        self.own: dict[str, torch.Tensor] = {}
        """What this rank has sent, by parameter name: float32 [shape], in the unit of torch's
        momentum buffer."""
        self.steps = 0
        """Steps that were taken: those that overflow do not count."""
        self._rooms: dict[str, torch.Tensor] = {}  # for what is sent next
        self.owned: set[int] = set()
        """Ids of the optimizer's parameters."""

    def reduce_bucket(self, bucket: GradBucket) -> Future:
        """See `Transform`: average the gradients of other optimizers' parameters."""
        self.refuse_join()
        values = bucket.buffer()
        mine = [id(parameter) in self.owned for parameter in bucket.parameters()]
        others = [] if all(mine) else [values]
        if any(mine) and others:
            both = zip(mine, bucket.gradients(), strict=True)
            others = [gradient for own, gradient in both if not own]
        return self._averaged(values, others)

    def _averaged(self, values: torch.Tensor, others: list[torch.Tensor]) -> Future:
        """Average some gradients of a bucket; return a future of the bucket."""
        if not others:
            return completed(values)
        if others[0] is values:
            return average(values, self.state.process_group)
        flat = torch.cat([gradient.reshape(-1) for gradient in others])

        def put_back(done: Future) -> torch.Tensor:
            parts = torch.split(done.value(), [gradient.numel() for gradient in others])
            for gradient, part in zip(others, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
            return values

        return average(flat, self.state.process_group).then(put_back)

    def reduce(self, tensor: torch.Tensor, names: Sequence[str]) -> Future:
        """See `Transform`; fills `before`."""
        self.before = {}
        bucket = self.reducer.bucket_of(tuple(names), tensor.device)
        if self.state.process_group.size() > 1 and not bucket.levels:
            befores = self.reducer.residuals_before(bucket.pieces, bucket)
            for piece, before in zip(bucket.pieces, befores, strict=True):
                if before is not None:
                    self.before[piece.name] = before
        return self.reducer.reduce(tensor, names)

    def room(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return memory for what this rank sends of a parameter [shape]; `keep` makes it that."""
        if name not in self._rooms:
            self._rooms[name] = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        return self._rooms[name]

    def keep(self, name: str) -> None:
        """Let the room of a parameter be what this rank has sent.

        What that was before is the next room on the CPU, where pages of new memory cost time. On a
        device it is free for the next forward.
        """
        before = self.own.get(name)
        self.own[name] = self._rooms.pop(name)
        if before is not None and before.is_cpu:
            self._rooms[name] = before

    def adopted(self) -> None:
        """See `Transform`: ranks go on from the momentum, of which lost ones had a part."""
        self.own = {}

    def state_dict(self) -> dict[str, Any]:
        """See `Transform`: what this rank has sent."""
        own = {name: value.clone() for name, value in self.own.items()}
        return {f"sent{dist.get_rank()}": (self.state.step, own, self.steps)}

    def keys(self, before: int) -> list[str]:
        """See `Transform`."""
        if before == self.state.process_group.size():
            return [f"sent{dist.get_rank()}"]
        return [f"sent{rank}" for rank in range(before)]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See `Transform`. On another number of ranks each takes the mean of the tensors."""
        (about,) = saved["about"]
        entries = [saved[key] for key in self.keys(about["world_size"])]
        parts = [entry[1] for entry in entries]
        step, _, *steps = entries[0]
        self.steps = steps[0] if steps else step  # states of before counted all steps
        self.own = {
            name: torch.stack([part[name] for part in parts if name in part])
            .mean(0)
            .to(self.reducer.device)
            for name in dict.fromkeys(name for part in parts for name in part)
        }
