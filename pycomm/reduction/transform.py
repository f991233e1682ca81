"""Transform: what an optimizer makes of a state's gradients before they are coded, and of averages.

A state without one averages gradients. An optimizer whose momentum travels gives its state one,
which the state calls at the places that the methods name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pycomm.errors import Error

if TYPE_CHECKING:
    from pycomm.reduction.bucket import Bucket

Future = torch.futures.Future[torch.Tensor]


class Transform:
    """What takes the place of gradients.

    It belongs to one state, whose constructor calls `bind`.
    """

    state: Any  # a CompressionState, which subclasses name: this module stands below its own
    reducer: Any  # its BucketReducer
    by_nodes = True
    """Nodes may code the sums of their ranks."""
    kept_alike = 1
    """Number of states of the size of the residuals, with these."""
    reduce: Callable[[torch.Tensor, Sequence[str]], Future]
    """Averages a bucket in place; see `BucketReducer.reduce`."""
    reduce_bucket: Callable[[dist.GradBucket], Future]
    """Where DDP reduces: averages a bucket in place; see `Adapter.reduce_bucket`."""
    scatter: Callable[..., Callable[[], None]]
    """Where gradients are reduce-scattered: starts to do so; see `BucketReducer.scatter`."""

    def bind(self, state: Any) -> None:
        """Belong to a state, which has no parameters yet."""
        self.state, self.reducer = state, state.reducer

    # ------------------------------------------------------------------ parameters

    def exact(self, parameter: torch.Tensor) -> str:
        """Return why a parameter travels exactly whatever the policy says; "": it need not."""
        return ""

    def entered(self, name: str) -> None:
        """The state has got a parameter."""

    def check_exact(self, names: Sequence[str], why: str) -> None:
        """Check that the gradients of some parameters can travel exactly in this step.

        Raises:
            Error: they cannot.
        """

    # ------------------------------------------------------------------ steps

    def before_step(self) -> None:
        """A step is to begin; the state has not changed yet."""

    def step_begun(self) -> None:
        """A step has begun."""

    def step_ended(self) -> None:
        """All buckets of a step were given to `reduce` or `scatter`."""

    def refuse_join(self) -> None:
        """Refuse to take part in a step for which this rank has no data.

        Raises:
            Error: Join shadows this rank.
        """
        if torch._C._current_graph_task_id() == -1:
            raise Error(
                f"rank {self.state.process_group.rank()}: Join shadows this rank, which has no "
                "more data and takes no more steps, so its momentum is not that of the others: "
                "give all ranks equally many batches, or use pycomm.compress"
            )

    def exchange(
        self,
        tensor: torch.Tensor,
        bucket: Bucket,
        group: dist.ProcessGroup,
        finish: Callable[[torch.Tensor], object] | None = None,
        **options: Any,
    ) -> torch.Tensor | None:
        """Average a bucket whose payloads Python moves; see `BucketReducer.exchange`."""
        finite: torch.Tensor | None = self.reducer.exchange(
            tensor, bucket, group, finish, **options
        )
        return finite

    # ------------------------------------------------------------------ checkpoints

    def drop_step(self) -> None:
        """Drop what a backward has left that no optimizer step has used: a state is loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return entries of the state's `state_dict`."""
        return {}

    def keys(self, before: int) -> list[str]:
        """Return the keys of the entries of `before` ranks that this rank needs."""
        return []

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the entries, after the state itself."""
