"""The coded momentum of one parameter, and its second moments by rows and columns.

With g the gradient of a rank, o what it has sent of the momentum, e its residual, and m the
momentum and d the root of the second moment, both equal on all ranks, a step is

    p = (b o + (1 - b) g) / d + e;  q = C(p);  e <- p - q;  o <- d q;  m <- d mean(q)

The mean of o over the ranks is m. The residual is in units of d. Eliminating it gives
p <- (b + v (1 - b)) p + (1 - b) g for a codec that leaves a share v of its input to the next step:
one pole instead of the two of a residual followed by momentum. b = (b1 - v) / (1 - v) gives it
Adam's horizon.

The second moment is that of the mean gradient, as Adam's: the ranks' own squares, which have more
noise, times the share of them that `pycomm.momentum.agreement` measures. Of an n x m
matrix it is the outer product of its row and column sums, divided by their total (Shazeer and Stern
2018, "Adafactor", section 3): n + m numbers, which travel exactly. Division by d before coding
makes all values of a block equally large, as they are in AdamW's update.

For SGD d is 1, but for the bound of its gradients: values count by their size, as in its update.
Its buffer is 1 / (1 - b1) times m, and m and o are kept in that unit, so that they stay what they
are when a schedule changes b1. Its weight decay, which
enters the buffer as a gradient, is exact and equal on all ranks: it is subtracted at once, as much
as it comes to, and does not travel.

A factor of d has a floor, relative to the root mean square of all, where the gradient is divided as
where the parameter moves: what the coding of a row errs by would else be multiplied by their
quotient in the update. It is a tenth for a row or column without a gradient for long, whose second
moment has decayed, and which would dominate the block in which it is coded: with a smaller one,
coding errors of such rows moved an embedding by 50 learning rates a step, and a run of 2,000 steps
diverged. One that is small in all steps, as that of a feature in small units, is no such row or
column, and its floor falls to a thousandth (`hear` of csrc/optim); gradients that are not 0 are no
sign of it, since an output for a rare word has small ones in all steps, and a large one now and
then.
A rank's gradient counts at most `CodedMoment.bound` times its root second moment. Steps in which no
rank has a gradient (an idle expert, LoRA's first factor at first) leave second moments as they are.
Sources: Tang et al. 2021, "1-bit Adam", algorithm 1, for a coded momentum with feedback.

Ranks may share the parameter by rows (FSDP2). Its sums are then those of the whole parameter, on
all ranks, and the momentum in the optimizer's state is that of the own rows.

The passes are those of csrc/optim, on the host as by kernels, with the same bits. What a step
decides by numbers (the coefficient of the momentum, how much of a gradient counts, how far second
moments decay) stays with them: a host queues a step on a device before it knows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from pycomm import _C
from pycomm.codecs import Codec
from pycomm.momentum import agreement
from pycomm.policy.quality import nominal_error

EXTRA = 3 + agreement.ROWS
"""Numbers besides the sums: squares of what the last coding has left, of its input, of this rank's
projections, and these projections, whose mean over the ranks makes place for its squares."""
BOUND = 3.0
"""Most that a rank's gradient counts in a step of AdamW, as a multiple of its root second moment,
over all values of a matrix. Second moments are known after the coding, up to some steps later:
without a bound, one gradient that is a hundred times too large moves all values by dozens of
learning rates, and stays in the momentum. Adam divides it by a root that it has enlarged itself."""
# Places in Numbers of csrc/optim/moments_params.h.
_STATES = {"moment_weight": 0, "coding_error": 1, "mean_energy": 2, "own_energy": 3}
_STEPS, _DECAY = 4, slice(8, 10)
FLOAT32_STATES = ("row", "column", "heard", *_STATES)
"""States that are float32 whatever the parameter is. Those without dimensions are where the passes
are: views of memory that a checkpoint does not need."""
_TINY = 1e-30
LIMIT = 50.0
"""Most that a coordinate moves in a step, in learning rates, while second moments are some steps
old. A value that waited for hundreds of steps moves it by dozens."""

assert EXTRA == _C.MOMENT_EXTRA


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or of a DTensor the shard of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class CodedMoment:
    """The momentum of one parameter of two or more dimensions: that of AdamW.

    It keeps what lasts in the optimizer's state: the momentum [shape], sharded like the parameter,
    and `row` [rows], `column` [columns], `heard` [2, rows + columns] (means, and squares), and
    numbers (float32, no dimensions), equal on all ranks, which are views of what the passes read
    and write: on a device, reading one waits for it.

    Args:
        parameter: the parameter; a DTensor's shards are rows, equally many on all ranks but the
            last ones.
        settings: the optimizer's group.
        state: the optimizer's state of the parameter.
        codec: codec of the momentum.
        shard: number of this rank's shard.
        shards: number of shards; 1: each rank has the whole parameter.
    """

    optimizer: ClassVar[str] = "CodedAdamW"
    """Name of the optimizer,"""
    key: ClassVar[str] = "exp_avg"
    """and that of the momentum in its state."""
    divides: ClassVar[bool] = True
    """The momentum is coded, and parameters move by it, divided by d."""

    @staticmethod
    @cache  # each bucket asks
    def bound(ranks: int) -> float:
        """Return the most that a rank's gradient counts, as a multiple of its root second moment.

        Args:
            ranks: number of ranks that average their momenta.
        """
        return BOUND

    def __init__(
        self,
        parameter: torch.Tensor,
        settings: dict[str, Any],
        state: dict[str, Any],
        codec: Codec,
        *,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self.parameter, self.settings, self.state = parameter, settings, state
        self.rows = parameter.shape[0]
        self.columns = parameter.numel() // max(1, self.rows)
        self.sums_numel = self.rows + self.columns + EXTRA
        self.padded = -(-self.rows // shards)
        """Rows of a shard, with padding."""
        self.shard = shard
        begin = min(self.rows, shard * self.padded)
        self._own = slice(begin, min(self.rows, begin + self.padded))
        self._error = nominal_error(codec) ** 2
        self.codec: Codec | None = codec
        """That of now; None: a state was loaded, whose error belongs to the one that comes."""
        sums, factors = self.sums_numel, self.rows + self.columns
        sizes = [_C.MOMENT_NUMBERS, sums, sums, factors, factors, factors, shards]
        self.device = local(parameter).device
        self.room = torch.zeros(sum(sizes), dtype=torch.float32, device=self.device)
        """What the passes keep beside the state; Room of csrc/optim/moments_params.h."""
        self.numbers, self._fresh, *_ = torch.split(self.room, sizes)
        self._views = {name: self.numbers[at] for name, at in _STATES.items()}
        self._restart()
        self._signs = agreement.table(self.columns, self.device)
        self.turn = (0, 0, 1)
        """Of this step: address of the signs, and the first row and the distance of those that
        have a projection; see `agreement`."""
        self.by = (0.0, 1.0)
        """Of this step: `momentum` and `kept`, which the passes of a bucket look at."""
        self._has_weight = False
        self.knows = False
        """There is a second moment by which to divide, or nothing divides."""
        self.entered = False
        """The passes have written the sums of this backward."""
        self.landed = False
        """The passes have made the gradient the momentum, and have looked at it."""
        self.is_stale = True
        """The factors are not those of the second moments."""

    def _restart(self) -> None:
        """Begin to count the steps since an exchange."""
        self.numbers[_STEPS] = 0
        self.numbers[_DECAY].view(torch.float64).fill_(1.0)

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.rows + self.columns, dtype=torch.float32, device=self.device)

    def start(self) -> None:
        """Fill an empty state; numbers that were loaded come to where the passes are."""
        state = self.state
        if self.key not in state:
            parameter, step = self.parameter, torch.zeros((), dtype=torch.float32, device="cpu")
            momentum = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            state.update(self._begun(step, momentum, self._zeros(), 0.0))
        for name, view in self._views.items():
            if state[name] is not view:
                view.copy_(state[name])
                state[name] = view

    def _begun(
        self, step: torch.Tensor, momentum: torch.Tensor, sums: torch.Tensor, weight: float
    ) -> dict[str, Any]:
        """Return a state without a coding so far."""
        numbers = {"moment_weight": weight, "coding_error": self._error}
        numbers |= {"mean_energy": 0.0, "own_energy": 0.0}
        return {
            "step": step,
            self.key: momentum,
            "row": sums[: self.rows].clone(),
            "column": sums[self.rows :].clone(),
            "heard": self._zeros().repeat(2, 1),
            **{
                name: torch.tensor(number, dtype=torch.float32, device="cpu")
                for name, number in numbers.items()
            },
        }

    def rebind(self, settings: dict[str, Any], state: dict[str, Any]) -> None:
        """Use another state, for example after a checkpoint was loaded."""
        self.settings, self.state = settings, state
        self.codec = None
        self._restart()
        self._has_weight, self.is_stale = False, True

    @property
    def momentum(self) -> float:
        """Coefficient of an exact momentum."""
        return float(self.settings["betas"][0])

    @property
    def kept(self) -> float:
        """What is kept of the momentum, in the state and of what was sent, is this times m."""
        return 1.0

    @property
    def decay(self) -> float:
        """Coefficient of the second moments."""
        return float(self.settings["betas"][1])

    @property
    def eps(self) -> float:
        """What is added to d where it divides."""
        return float(self.settings["eps"])

    def advance(self, lr: float, weight_decay: float) -> tuple[float, float, float]:
        """Return what a step of the group's settings multiplies a move by, what is left of the
        parameter, and the most that a value moves while second moments are old."""
        correction = 1 - self.momentum ** self.state["step"].item()
        return lr / correction, 1 - lr * weight_decay, LIMIT * correction

    def from_torch(
        self, state: dict[str, Any], total: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, Any]:
        """Return the state for one of torch's optimizer; second moments become their sums.

        Args:
            state: that of torch's optimizer.
            total: function that adds sums of the own rows up over the shards.
        """
        sums = self._zeros()
        squares = local(state["exp_avg_sq"]).reshape(-1, self.columns).float()
        sums[: self.rows][self._own] = squares.sum(1)
        sums[self.rows :] = squares.sum(0)
        weight = 1 - self.decay ** float(state["step"])
        return self._begun(state["step"], state["exp_avg"].contiguous(), total(sums), weight)

    def as_torch(self) -> dict[str, Any]:
        """Return a copy of the state as torch's optimizer has it: second moments become full."""
        state = self.state
        row, column = state["row"][self._own], state["column"]
        weight = 1 - self.decay ** float(state["step"])
        share = weight / max(_TINY, float(column.sum()) * float(state["moment_weight"]))
        squares = torch.zeros_like(self.parameter)
        local(squares).copy_(torch.outer(row * share, column).view_as(local(squares)))
        return {
            "step": state["step"].clone(),
            "exp_avg": state["exp_avg"].clone(),
            "exp_avg_sq": squares,
        }

    def begin(self) -> None:
        """Begin a backward; the host waits for a device until there is a second moment."""
        self.start()
        self.landed = self.entered = False
        if self.divides and not self._has_weight:
            self._has_weight = float(self.state["moment_weight"]) > 0
        self.knows = self._has_weight or not self.divides
        step = int(self.state["step"])
        first, stride = agreement.turn(self.rows, step)
        signs = self._signs.data_ptr() + 4 * agreement.place_of_signs(step)
        self.turn = signs, first, stride
        self.by = self.momentum, self.kept

    def use(self, codec: Codec) -> None:
        """Set the codec of this step: another one's error is not known yet."""
        if self.codec is not None and codec != self.codec:
            self.state["coding_error"].fill_(nominal_error(codec) ** 2)
        self.codec = codec

    def complete(self) -> None:
        """Make the sums of a backward that had nothing of the parameter zeros."""
        if not self.entered:
            self._fresh.zero_()
            self.entered = True


class SGDMoment(CodedMoment):
    """The momentum of SGD, whose groups have `momentum`."""

    optimizer, key, divides = "CodedSGD", "momentum_buffer", False
    decay, eps = 0.99, 0.0
    """A horizon of a hundred steps, since nothing but the bound of gradients asks for them."""

    @staticmethod
    @cache  # each bucket asks
    def bound(ranks: int) -> float:
        """See `CodedMoment`: 10 for one rank, times the root of their number.

        Nothing divides the step, so what is cut is missing. A gradient that comes once in a hundred
        steps, on one rank alone, is so many times the root of its second moment, and counts whole.
        """
        return 10.0 * math.ceil(math.sqrt(ranks))

    @property
    def momentum(self) -> float:
        """See `CodedMoment`."""
        return float(self.settings["momentum"])

    @property
    def kept(self) -> float:
        """See `CodedMoment`: torch's buffer is a sum of gradients."""
        return 1 / max(_TINY, 1 - self.momentum)  # 1 is refused, but by the step that comes

    def advance(self, lr: float, weight_decay: float) -> tuple[float, float, float]:
        """See `CodedMoment`."""
        return lr * self.kept, max(0.0, 1 - lr * self.kept * weight_decay), 0.0

    def from_torch(
        self, state: dict[str, Any], total: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, Any]:
        """See `CodedMoment`; there are no second moments yet."""
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        return self._begun(step, state[self.key].contiguous(), self._zeros(), 0.0)

    def as_torch(self) -> dict[str, Any]:
        """See `CodedMoment`."""
        return {self.key: self.state[self.key].clone()}
