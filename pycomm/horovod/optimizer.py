"""Horovod's `DistributedOptimizer`: an optimizer that averages the gradients before it uses them.

Gradients are reduced while backward still runs. Parameters share flat buckets, in the reverse order
of the optimizer; a bucket starts when all of its gradients are there and the buckets before it have
started, so that all ranks start them in one order. `CompressionState` reduces them, as it does for
DistributedDataParallel: with any codec, residuals, and the same bits on all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pycomm.arguments import number, typed, whole
from pycomm.errors import Error
from pycomm.horovod.basics import size
from pycomm.horovod.compression import Coded, Compression
from pycomm.horovod.operations import Op
from pycomm.policy import EXACT, Policy
from pycomm.reduction.state import CompressionState

BUCKET_BYTES = 25 << 20  # DDP's default; Horovod's cycle fuses up to 128 MB
FIRST_BYTES = 1 << 20  # small, so that the first exchange starts early


class _Bucket:
    """Parameters of one dtype and device, whose gradients travel together."""

    def __init__(self, parameters: list[torch.nn.Parameter], names: list[str]) -> None:
        self.parameters, self.names = parameters, names
        numel = sum(parameter.numel() for parameter in parameters)
        flat = torch.zeros(numel, dtype=parameters[0].dtype, device=parameters[0].device)
        views = torch.split(flat, [parameter.numel() for parameter in parameters])
        self.views = [view.view(p.shape) for view, p in zip(views, parameters, strict=True)]
        self.flat = flat
        self.missing = len(parameters)
        self.future: torch.futures.Future[torch.Tensor] | None = None


class GradientReducer:
    """The exchange of one optimizer's gradients."""

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        compression: Any,
        passes: int,
        op: Op,
        predivide: float,
    ) -> None:
        self.passes, self.op, self.predivide = passes, op, predivide
        policy, feedback = _policy(compression)
        self.state = CompressionState(policy, feedback=feedback)
        self._buckets: list[_Bucket] = []
        self._place: dict[torch.nn.Parameter, _Bucket] = {}
        self._count: dict[torch.nn.Parameter, int] = {}
        self._started = 0
        learned = [(name, p) for name, p in named if p.requires_grad]
        for name, parameter in learned:
            self.state.add(name, parameter)
            self._count[parameter] = 0
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
        self.state.plan.complete()
        self.state.agree()
        for group in _split(learned[::-1]):
            bucket = _Bucket([p for _, p in group], [name for name, _ in group])
            self._buckets.append(bucket)
            self._place.update(dict.fromkeys(bucket.parameters, bucket))

    @property
    def pending(self) -> bool:
        """Whether gradients are on the way."""
        return self._started > 0

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        if self._count[parameter] == self.passes:
            raise Error(
                f"more than {self.passes} backward passes before step(): raise "
                "backward_passes_per_step to accumulate gradients on the rank"
            )
        self._count[parameter] += 1
        if self._count[parameter] == self.passes:
            self._place[parameter].missing -= 1
            while self._started < len(self._buckets) and not self._buckets[self._started].missing:
                self._start()

    @torch.no_grad()
    def _start(self) -> None:
        if self._started == 0:
            self.state.begin_step()
        bucket = self._buckets[self._started]
        self._started += 1
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()  # no backward on this rank has used it
            else:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if self.predivide != 1.0:
            bucket.flat.div_(self.predivide)
        flat = bucket.flat
        values = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        bucket.future = self.state.reduce(values, bucket.names)
        if self._started == len(self._buckets):
            self.state.end_step()

    @torch.no_grad()
    def finish(self) -> None:
        """Start what has not been started, and write all results to the gradients."""
        while self._started < len(self._buckets):
            self._start()
        factor = self.predivide * (size() if self.op is Op.Sum else 1)
        for bucket in self._buckets:
            assert bucket.future is not None
            bucket.future.wait()
            if factor != 1.0:
                bucket.flat.mul_(factor)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)
            bucket.missing, bucket.future = len(bucket.parameters), None
        self.reset()

    def reset(self) -> None:
        """Begin to count the backward passes of the next step."""
        self._started = 0
        self._count = dict.fromkeys(self._count, 0)
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)


def _policy(compression: Any) -> tuple[str | Policy, Any]:
    """Return the policy and the feedback of a choice of `Compression`."""
    if isinstance(compression, Coded):
        return compression.policy, compression.feedback
    if compression is Compression.none:
        return Policy(EXACT, rules=(), guard=None), False
    if compression is Compression.fp16:
        return Policy.of("fp16"), False
    raise Error(
        "DistributedOptimizer takes Compression.none, fp16, or Compression.codec(...) in place of "
        "a compressor of your own: Compression.codec('int4') sends 4 bits, with error feedback"
    )


def _split(
    named: list[tuple[str, torch.nn.Parameter]],
) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
    """Split parameters into buckets: neighbours of one dtype and device, of limited size."""
    group: list[tuple[str, torch.nn.Parameter]] = []
    held, limit = 0, FIRST_BYTES
    for name, parameter in named:
        first = group[0][1] if group else parameter
        alike = (first.dtype, first.device) == (parameter.dtype, parameter.device)
        if group and (held >= limit or not alike):
            yield group
            group, held, limit = [], 0, BUCKET_BYTES
        group.append((name, parameter))
        held += parameter.numel() * parameter.element_size()
    if group:
        yield group


class _Distributed(torch.optim.Optimizer):
    """What a `DistributedOptimizer` has besides its optimizer's class, which it inherits."""

    _reducer: GradientReducer
    _synchronized: bool
    _skips: bool

    @property
    def compression_state(self) -> CompressionState:
        """Codecs and residuals: `summary()`, and `state_dict()` for checkpoints."""
        return self._reducer.state

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes add up to one step."""
        self._reducer.passes = whole("passes", passes, 1)
        self._reducer.reset()

    def synchronize(self) -> None:
        """Wait until the gradients of all ranks are averaged, to clip them before `step`."""
        self._reducer.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this block `step` uses the gradients as `synchronize` has left them."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over all ranks, and update the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._skips:
            if self._synchronized:
                warnings.warn(
                    "step() after synchronize() averages the gradients a second time: write "
                    "with optimizer.skip_synchronize(): optimizer.step()",
                    stacklevel=2,
                )
            self._reducer.finish()
        self._synchronized = False
        super().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients; not while they are on the way."""
        if self._reducer.pending:
            raise Error(
                "zero_grad() between backward() and step() would remove gradients that are on the "
                "way: call optimizer.step() or optimizer.synchronize() first"
            )
        super().zero_grad(set_to_none)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """Return an optimizer of the same class that averages gradients over all ranks; collective.

    Args:
        optimizer: any but those whose step calls its closure several times (LBFGS), or that need
            sparse gradients (SparseAdam).
        named_parameters: `model.named_parameters()`, for rules by name; None: numbers.
        compression: Compression.none, fp16, or Compression.codec("int4"), with error feedback.
        backward_passes_per_step: backward passes whose gradients add up on the rank.
        op: Average or Sum.
        gradient_predivide_factor: gradients are divided by it before they are summed, and
            multiplied by it after.
        num_groups: not used: gradients travel in buckets.
        groups: not used.
        sparse_as_dense: not used: sparse gradients always travel dense.
        process_set: not supported; None.

    Raises:
        ValueError: names are given twice, or not for all parameters; a factor is invalid.
        Error: another `op`, an optimizer that cannot be used, a compressor of one's own, or `init`
            was not called.

    Example:
        >>> import pycomm.horovod as hvd
        >>> hvd.init()  # doctest: +SKIP
        >>> optimizer = hvd.DistributedOptimizer(  # doctest: +SKIP
        ...     optimizer, model.named_parameters(), compression=hvd.Compression.codec("int4")
        ... )
    """
    size()
    typed("optimizer", optimizer, torch.optim.Optimizer)
    if op not in (Op.Average, Op.Sum):
        raise Error(f"DistributedOptimizer averages or sums gradients: op=hvd.Average, not {op}")
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise Error(
            f"DistributedOptimizer cannot drive {type(optimizer).__name__}: wrap the model in "
            "DistributedDataParallel instead"
        )
    if process_set is not None:
        raise Error("process_set is not supported: the optimizer averages over all ranks")
    if gradient_predivide_factor != 1.0 and op is not Op.Average:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average")
    predivide = number("gradient_predivide_factor", gradient_predivide_factor)
    if predivide <= 0:
        raise ValueError(f"gradient_predivide_factor={predivide} is invalid: expected more than 0")
    reducer = GradientReducer(
        _named(optimizer, named_parameters),
        compression,
        whole("backward_passes_per_step", backward_passes_per_step, 1),
        op,
        predivide,
    )
    # The same object's class changes, so that its state and whoever knows it stay: schedulers do.
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    vars(optimizer).pop("step", None)  # a scheduler's, which calls the former class's
    vars(optimizer).update(_reducer=reducer, _synchronized=False, _skips=False)
    return optimizer


def _named(
    optimizer: torch.optim.Optimizer,
    given: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the optimizer's parameters in its order, with their names."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if given is None:
        return [(f"parameter{n}", parameter) for n, parameter in enumerate(own)]
    pairs = list(given)
    names = {parameter: name for name, parameter in pairs}
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("named_parameters has a name twice: pass model.named_parameters()")
    if unnamed := [tuple(p.shape) for p in own if p not in names]:
        raise ValueError(
            f"named_parameters has no name for {len(unnamed)} parameters of the optimizer, the "
            f"first of shape {unnamed[0]}: pass all of model.named_parameters()"
        )
    return [(names[parameter], parameter) for parameter in own]
