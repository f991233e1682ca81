"""DDP's hook for an optimizer whose step exchanges the momentum: it averages no gradients."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from pycomm.errors import Error
from pycomm.feedback import storage
from pycomm.hooks.single_coded import SingleCodedState
from pycomm.reduction.reducer import completed
from pycomm.reduction.state import CompressionState


class SentMomentumState(SingleCodedState):
    """Codecs of the momentum, and what each rank has sent of it.

    With a loss scaler ranks have to agree on whether a step overflows, since each of them skips it
    and lowers its scale by what it finds in its own gradients. So a rank's overflow is told to all,
    which put Inf into a gradient each.

    Args:
        codec, options: as for `CompressionState`.
        scaled: a `torch.amp.GradScaler` scales the gradients.
    """

    before: dict[str, torch.Tensor]
    """Residuals before the last coding, where that has overwritten them."""

    def __init__(self, *codec: Any, scaled: bool, **options: Any) -> None:
        super().__init__(*codec, **options)
        self.own: dict[str, torch.Tensor] = {}
        """What this rank has sent, by parameter name: float32 [shape]."""
        self._scaled = scaled
        self._found_inf = False

    def keep(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return a bucket as it is, or with Inf if a rank's gradients are not finite."""
        if torch._C._current_graph_task_id() == -1:
            raise Error(
                f"rank {self.process_group.rank()}: Join shadows this rank, which has no more data "
                "and takes no more steps, so that it cannot take part in those of the others: give "
                "all ranks equally many batches"
            )
        values = bucket.buffer()
        if self._scaled:
            self._found_inf &= bucket.index() > 0  # else it is of a backward that has failed
            self._found_inf |= not bool(values.isfinite().all())
            if bucket.is_last():
                flag = torch.tensor(
                    [float(self._found_inf)], device=values.device, dtype=torch.float32
                )
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.process_group)
                self._found_inf = False
                if float(flag):
                    values.fill_(torch.inf)
        return completed(values)

    def reduce(
        self, tensor: torch.Tensor, names: Sequence[str]
    ) -> torch.futures.Future[torch.Tensor]:
        """See `BucketReducer`; fills `before`."""
        self.before = {}
        bucket = self._bucket(tuple(names), tensor.device)
        if self.process_group.size() > 1 and not bucket.levels:
            for piece in bucket.pieces:
                stored = self.residual_before(piece.residual, bucket)
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
        return {**super().state_dict(), f"own{dist.get_rank()}": (self.step, own)}

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
            name: torch.stack([part[name] for part in parts if name in part]).mean(0)
            for name in dict.fromkeys(name for part in parts for name in part)
        }

    def _needed_besides(self, before: int) -> list[str]:
        if before == self.process_group.size():
            return [f"own{dist.get_rank()}"]
        return [f"own{rank}" for rank in range(before)]


def keep_local(state: SentMomentumState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave each rank the gradients of its own data; a communication hook of DDP."""
    return state.keep(bucket)
