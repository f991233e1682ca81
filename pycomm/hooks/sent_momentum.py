"""DDP's hook for an optimizer whose step exchanges the momentum of its parameters."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from pycomm import backend
from pycomm.errors import Error
from pycomm.feedback import storage
from pycomm.reduction.reducer import average, completed
from pycomm.reduction.state import CompressionState


class SentMomentumState(CompressionState):
    """Codecs of the momentum, and what each rank has sent of it.

    Each rank keeps the gradients of its own data for the optimizer's parameters. Those of other
    parameters are averaged exactly, as DDP does.

    Args:
        codec, options: as for `CompressionState`.
    """

    codes_once = True
    has_factors = False
    before: dict[str, torch.Tensor]
    """Residuals before the last coding, where that has overwritten them."""

    def __init__(self, *codec: Any, **options: Any) -> None:
        super().__init__(*codec, **options)
        self.own: dict[str, torch.Tensor] = {}
        """What this rank has sent, by parameter name: float32 [shape], in the unit of torch's
        momentum buffer."""
        self.owned: set[int] = set()
        """Ids of the optimizer's parameters."""

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the gradients of other optimizers' parameters in a bucket."""
        if torch._C._current_graph_task_id() == -1:
            raise Error(
                f"rank {self.process_group.rank()}: Join shadows this rank, which has no more data "
                "and takes no more steps, so that it cannot take part in those of the others: give "
                "all ranks equally many batches"
            )
        values = bucket.buffer()
        mine = [id(parameter) in self.owned for parameter in bucket.parameters()]
        others = [] if all(mine) else [values]
        if any(mine) and others:
            both = zip(mine, bucket.gradients(), strict=True)
            others = [gradient for own, gradient in both if not own]
        return self._averaged(values, others)

    def _averaged(
        self, values: torch.Tensor, others: list[torch.Tensor]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average some gradients of a bucket; return a future of the bucket."""
        if not others:
            return completed(values)
        if others[0] is values:
            return average(values, self.process_group)
        flat = torch.cat([gradient.reshape(-1) for gradient in others])

        def put_back(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            parts = torch.split(done.value(), [gradient.numel() for gradient in others])
            for gradient, part in zip(others, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
            return values

        return average(flat, self.process_group).then(put_back)

    def reduce(
        self, tensor: torch.Tensor, names: Sequence[str]
    ) -> torch.futures.Future[torch.Tensor]:
        """See `BucketReducer`; fills `before`."""
        self.before = {}
        bucket = self._bucket(tuple(names), tensor.device)
        if self.process_group.size() > 1 and not bucket.levels:
            for piece in bucket.pieces:
                stored = self.residual_before(piece, bucket)
                if stored is not None:
                    self.before[piece.name] = storage.load(stored, piece.numel)
        return super().reduce(tensor, names)

    def codes_sums(self, names: Iterable[str], device: torch.device) -> bool:
        """Whether nodes code the sums of their ranks, of which none has sent anything of its own.

        Args:
            names: the parameters of a bucket.
            device: where they are.
        """
        if self.process_group.size() == 1:
            return False
        return bool(self._bucket(tuple(names), device).levels)

    def adopt_state(self, previous: CompressionState | None) -> None:
        """See `CompressionState`: ranks go on from the momentum, of which lost ones had a part."""
        super().adopt_state(previous)
        self.own = {}

    def state_dict(self) -> dict[str, Any]:
        """See `CompressionState`; also has what this rank has sent."""
        own = {name: value.clone() for name, value in self.own.items()}
        return {**super().state_dict(), f"sent{dist.get_rank()}": (self.step, own)}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """See `CompressionState`. On another number of ranks each takes the mean of the tensors."""
        super().load_state_dict(*states)
        saved = {key: value for state in states for key, value in state.items()}
        (about,) = saved["about"]
        keys = self._needed_besides(about["world_size"])
        if missing := [key for key in keys if key not in saved]:
            raise ValueError(
                f"each rank has sent a momentum of its own, and this state has no "
                f"{', '.join(missing)}"
            )
        parts = [saved[key][1] for key in keys]
        self.own = {
            name: torch.stack([part[name] for part in parts if name in part])
            .mean(0)
            .to(self._device)
            for name in dict.fromkeys(name for part in parts for name in part)
        }

    def _needed_besides(self, before: int) -> list[str]:
        if before == self.process_group.size():
            return [f"sent{dist.get_rank()}"]
        return [f"sent{rank}" for rank in range(before)]


def sent_momentum_hook(
    state: SentMomentumState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Leave each rank its own gradients of the optimizer's parameters; a hook of DDP."""
    future = state.reduce_bucket(bucket)
    backend.wait_after_backward(future, state.process_group)
    return future
