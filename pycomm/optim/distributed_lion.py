"""Lion for data-parallel models whose ranks vote on the sign of each update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import nn

from pycomm.optim.base import LocalGradientOptimizer, Part
from pycomm.optim.votes import Votes

Result = Literal["majority", "mean"]


class DistributedLion(LocalGradientOptimizer):
    """Lion whose ranks send one bit for each value, the sign of their own update.

    With the gradient g of a rank and its own momentum m a step is

        u = sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g;  x <- x - lr (U + wd x)

    where U is the majority of all u, 0 if there is none, or their mean (Liu et al. 2024,
    "Communication efficient distributed training with Distributed Lion", arXiv 2404.00438,
    algorithm 1; the update and its momentum are those of Chen et al. 2023, "Lion"). Nothing is
    fed back. Every parameter votes, whatever its size. One bit has no zero: where b1 m + (1 - b1) g
    is 0, as in rows of an embedding that were never used, a rank votes for both signs in turns.

    Collective: every rank makes one, after the model is wrapped and before the first backward.
    DDP averages no gradients any more: after a backward each rank has those of its own data, and
    clipping bounds them rank by rank.

    Args:
        params: parameters or groups, as for other optimizers of torch.
        lr: learning rate, three to ten times smaller than AdamW's.
        betas: of the update and of the momentum.
        weight_decay: decoupled weight decay; with Lion's learning rate, as many times larger.
        model: the model of these parameters, in `DistributedDataParallel`.
        result: "majority": the answer is one bit a value too, or two for an even number of ranks.
            "mean": four bits up to 13 ranks, eight up to 253.
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one.

    Raises:
        TypeError: the model is not in DDP, or an argument has another type.
        ValueError: an option is out of range, or a parameter does not belong to the model.
        Error: the model has a communication hook already.
        WireMismatch: ranks have different options; on all ranks, before anything else is sent.

    Example:
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
        >>> optimizer = pycomm.DistributedLion(
        ...     model.parameters(), lr=3e-4, model=model
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        model: nn.Module,
        result: Result = "majority",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if result not in get_args(Result):
            raise ValueError(f"DistributedLion: result={result!r}: use majority or mean")
        self._majority = result == "majority"
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, model=model, scaler=scaler, terms=[f"result={result}"])

    def _make_state(self) -> Votes:
        return Votes(majority=self._majority, process_group=self.process_group)

    def _take(self, parts: list[Part]) -> None:
        state = self.compression
        assert isinstance(state, Votes)
        momenta, votes = {}, {}
        for part in parts:
            beta1 = part.group["betas"][0]
            momentum = state.own.get(part.name)
            if momentum is None:
                momentum = torch.zeros_like(part.parameter, dtype=torch.float32)
            momenta[part.name] = momentum
            update = momentum * beta1 + part.gradient * (1 - beta1)
            votes[part.name] = _vote(update.reshape(-1), self.process_group.rank() + state.step)
        results = self._exchange(votes)
        if results is None:
            return
        for part in parts:
            lr, weight_decay = float(part.group["lr"]), float(part.group["weight_decay"])
            beta2 = part.group["betas"][1]
            momentum = momenta[part.name]
            state.own[part.name] = momentum.mul_(beta2).add_(part.gradient, alpha=1 - beta2)
            result = results[part.name].view_as(part.parameter)
            part.parameter.mul_(1 - lr * weight_decay)
            part.parameter.add_(result.to(part.parameter.dtype), alpha=-lr)


def _vote(update: torch.Tensor, turn: int) -> torch.Tensor:
    """Return +1 and -1 for the signs of an update [numel]; NaN where it is not finite."""
    votes = update.sign() + update * 0
    undecided = votes == 0
    if undecided.any():
        places = torch.arange(turn, turn + votes.numel(), device=votes.device, dtype=torch.int64)
        votes = torch.where(undecided, 1.0 - 2.0 * (places % 2), votes)
    return votes
