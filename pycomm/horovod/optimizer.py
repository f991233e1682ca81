"""Horovod's `DistributedOptimizer`: an optimizer that averages the gradients before it uses them.

Gradients are reduced while backward still runs. Parameters share flat buckets, in the reverse order
of the optimizer; a bucket starts when all of its gradients are there and the buckets before it have
started, so that all ranks start them in one order. `CompressionState` reduces them, as it does for
DistributedDataParallel: with any codec, residuals, and the same bits on all ranks.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,  # small, so that the first exchange starts early
    _compute_bucket_assignment_by_size,
)

from pycomm.arguments import typed, whole
from pycomm.errors import Error, WireMismatch
from pycomm.horovod.basics import size
from pycomm.horovod.calls import Call
from pycomm.horovod.operations import Coded, Compression, Op
from pycomm.horovod.process_sets import (
    ProcessSet,
    check_made,
    global_process_set,
    group_of,
)
from pycomm.policy import EXACT, Policy
from pycomm.reduction.state import CompressionState

BUCKET_BYTES = 25 << 20  # DDP's default; Horovod's cycle fuses up to 128 MB
BLOCK = 1 << 16  # values that are summed up together: they stay in a processor's cache
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that is another one after values of a tensor were changed.

    It is the sum of the values' bits as integers, each times an odd number of its place, modulo
    2^64: a change of one value always shows, and one of several values but for a chance of 2^-32 at
    most. Nothing is copied, and the processor does not wait for a device.

    Args:
        tensor: of any dtype and layout; of a sparse one places count, too.

    Returns:
        int64 without dimensions.
    """
    tensor = tensor.detach()
    if tensor.is_sparse:
        return sum_of_bits(tensor._values()) * 3 + sum_of_bits(tensor._indices())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    block = BLOCK if flat.is_cpu else 16 * BLOCK
    weights, total = _odd_numbers(block, flat.device), flat.new_zeros((), dtype=torch.int64)
    for part in torch.split(bits, block):
        total.mul_(_ODD).add_(weights[: part.numel()].mul(part).sum())
    return total


_ODD = 0x5851F42D4C957F2D  # Knuth's MMIX multiplier


@lru_cache(maxsize=8)
def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _ODD
    return ((numbers ^ (numbers >> 29)) * _ODD) | 1


class GradientBucket:
    """Parameters of one dtype and device, whose gradients travel together."""

    def __init__(self, parameters: list[torch.nn.Parameter], names: list[str]) -> None:
        self.parameters, self.names = parameters, names
        numel = sum(parameter.numel() for parameter in parameters)
        flat = torch.zeros(numel, dtype=parameters[0].dtype, device=parameters[0].device)
        views = torch.split(flat, [parameter.numel() for parameter in parameters])
        self.views = [view.view(p.shape) for view, p in zip(views, parameters, strict=True)]
        self.flat = flat
        self.missing = len(parameters)
        # Gradients and sums of their bits: GradScaler's kernel and what goes through `.data` write
        # values without counting a gradient's version up.
        self.sent: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self.future: torch.futures.Future[torch.Tensor] | None = None

    def fill(self) -> None:
        """Copy the gradients."""
        self.sent = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is None:
                self.sent.append((None, None))
                view.zero_()  # frozen, or no backward on this rank has used it
            else:
                self.sent.append((gradient, sum_of_bits(gradient)))
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def changed(self) -> str:
        """Return the name of a gradient that was changed since `fill`, or ""."""
        differ: dict[str, torch.Tensor] = {}
        for parameter, name, (gradient, bits) in zip(
            self.parameters, self.names, self.sent, strict=True
        ):
            trained = parameter.requires_grad or gradient is not None
            if trained and parameter.grad is not gradient:
                return name
            if gradient is not None and bits is not None:
                differ[name] = sum_of_bits(gradient) != bits
        told = torch.stack([*differ.values()]).tolist() if differ else []
        return next((name for name, one in zip(differ, told, strict=True) if one), "")

    def empty(self) -> None:
        """Write the results to the gradients of those parameters that are trained.

        One that was frozen while its gradient travelled takes part in this step.
        """
        for parameter, view, sent in zip(self.parameters, self.views, self.sent, strict=True):
            if not parameter.requires_grad and sent[0] is None:
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)


def _call(method: weakref.WeakMethod[Callable[[Any], None]], argument: Any) -> None:
    """Call a method, unless its object is gone."""
    alive = method()
    if alive is not None:
        alive(argument)


class GradientReducer:
    """The exchange of one optimizer's gradients.

    Parameters that are frozen, thawed, or added to the optimizer between two steps are followed: at
    each step the ranks compare which ones they train, and how they average.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.nn.Parameter, str],
        compression: Any,
        passes: int,
        op: Op,
        process_set: ProcessSet,
    ) -> None:
        self.passes, self.op = passes, op
        self.names = names
        self._optimizer = weakref.ref(optimizer)
        self._process_set = process_set
        policy, feedback = _policy(compression)
        self.state = CompressionState(
            policy, feedback=feedback, process_group=group_of(process_set)
        )
        self._buckets: list[GradientBucket] = []
        self._place: dict[torch.nn.Parameter, GradientBucket] = {}
        self._count: dict[torch.nn.Parameter, int] = {}
        self._started = 0
        self._call: Call | None = None  # of the step that has begun
        self._new = self._untold()  # parameters that the other ranks do not know of yet
        self._enter()
        self.state.agree()
        self.reset()

    @property
    def pending(self) -> bool:
        """Whether gradients are on the way."""
        return self._call is not None

    def _trained(self) -> list[torch.nn.Parameter]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]

    def _untold(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are trained and were not before, which get names."""
        new = [p for p in self._trained() if p not in self._count]
        for parameter in new:
            self.names.setdefault(parameter, f"parameter{len(self.names)}")
        return new

    def _enter(self) -> None:
        """Enter the new parameters, which all ranks train."""
        named = []
        for parameter in self._new:
            name = self.names[parameter]
            named.append((name, parameter))
            self.state.add(name, parameter)
            self._count[parameter] = 0
            # Weak: the garbage collector does not see what torch keeps for a parameter in C++.
            hook = partial(_call, weakref.WeakMethod(self._arrived))
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        named.reverse()
        tensors: list[torch.Tensor] = [parameter for _, parameter in named]
        sizes = [_DEFAULT_FIRST_BUCKET_BYTES, BUCKET_BYTES]
        for group in _compute_bucket_assignment_by_size(tensors, sizes)[0] if named else ():
            bucket = GradientBucket([named[n][1] for n in group], [named[n][0] for n in group])
            self._buckets.append(bucket)
            self._place.update(dict.fromkeys(bucket.parameters, bucket))
        self._new = []

    @torch.no_grad()
    def _begin(self) -> None:
        """Begin a step: tell the other ranks what this one trains, and how it averages."""
        if self._call is not None:
            return
        self._new = self._untold()
        parts = [f"{self.names[p]} {list(p.shape)}" for p in self._trained()]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        few = ", ".join(parts[:2] + ["..."] * (len(parts) > 2))
        text = (
            f"a step that trains {len(parts)} parameters by {self.op.name}, {self.passes} backward "
            f"passes ({few}; {digest})"
        )
        call = Call(self._process_set, text)
        for bucket in self._buckets:
            bucket.missing = sum(p.requires_grad for p in bucket.parameters)
        self.state.begin_step()
        self.state.reducer.step.busy_until = "optimizer.step() or optimizer.synchronize()"
        self._call = call

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        if self._count[parameter] == self.passes:
            raise Error(
                f"more than {self.passes} backward passes before step(): raise "
                "backward_passes_per_step to accumulate gradients on the rank"
            )
        self._count[parameter] += 1
        if self._count[parameter] == self.passes:
            self._begin()
            self._place[parameter].missing -= 1
            while self._started < len(self._buckets):
                bucket = self._buckets[self._started]
                if bucket.missing:
                    break
                self._start()

    @torch.no_grad()
    def _start(self) -> None:
        bucket = self._buckets[self._started]
        self._started += 1
        bucket.fill()
        flat = bucket.flat
        values = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        bucket.future = self.state.reduce(values, bucket.names)
        if self._started == len(self._buckets) and not self._new:
            self.state.end_step()

    def _complete(self) -> None:
        """Start what has not been started, and wait for all results."""
        while self._started < len(self._buckets):
            self._start()
        if self.state.is_open:
            self.state.end_step()
        for bucket in self._buckets:
            assert bucket.future is not None
            self.state.wait(bucket.future)

    def _exchange(self) -> None:
        """Exchange all buckets.

        Raises:
            WireMismatch: ranks train other parameters, or average them differently; on all ranks.
        """
        assert self._call is not None
        try:
            self._call.check()
        except WireMismatch:
            # Some ranks have started buckets: the others answer, so that the group can be used on.
            self._new = []
            self._complete()
            self.state.discard()
            raise
        self._enter()
        self._complete()

    @torch.no_grad()
    def finish(self) -> None:
        """Start what has not been started, and write all results to the gradients.

        Whatever it raises, the next step begins anew.

        Raises:
            WireMismatch: ranks train other parameters, or average them differently; on all ranks.
            Error: a gradient was changed while it travelled.
        """
        try:
            self._begin()
            self._exchange()
        finally:
            self.reset()
        changed = next(filter(None, (bucket.changed() for bucket in self._buckets)), "")
        if changed:
            raise Error(
                f"the gradient of {changed} was scaled, clipped, zeroed or replaced between "
                "backward() and step(), while it travelled: call optimizer.synchronize() before "
                "you change gradients (scaler.unscale_(optimizer), too), and then "
                "with optimizer.skip_synchronize(): optimizer.step()"
            )
        factor = self.state.process_group.size() if self.op is Op.Sum else 1
        for bucket in self._buckets:
            if factor != 1:
                bucket.flat.mul_(factor)
            bucket.empty()

    def reset(self) -> None:
        """Begin to count the backward passes of the next step."""
        self._started, self._call = 0, None
        self.state.reducer.step.busy_until = ""
        self._count = dict.fromkeys(self._count, 0)
        for bucket in self._buckets:
            bucket.future = None


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


class _Distributed(torch.optim.Optimizer):
    """What a `DistributedOptimizer` has besides its optimizer's class, which it inherits."""

    _reducer: GradientReducer | None  # None: the process set does not include this rank
    _parameter_names: dict[torch.nn.Parameter, str]
    _synchronized: bool
    _skips: bool

    @property
    def compression_state(self) -> CompressionState:
        """Codecs and residuals: `summary()`, and `state_dict()` for checkpoints.

        Raises:
            Error: the process set does not include this rank.
        """
        if self._reducer is None:
            raise Error("this rank is not in the optimizer's process set, and compresses nothing")
        return self._reducer.state

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy.

        Raises:
            Error: always.
        """
        raise Error(
            f"a DistributedOptimizer, of {type(self).__name__}, cannot be copied or pickled, since "
            "it averages the gradients of its own parameters: keep its state_dict(), or copy model "
            "and optimizer before, and give the copy to DistributedOptimizer"
        )

    def _check_idle(self, what: str) -> None:
        """Check that no gradients are on the way.

        Raises:
            Error: they are.
        """
        if self._reducer is not None and self._reducer.pending:
            raise Error(
                f"{what}: gradients are on the way: call optimizer.step() or "
                "optimizer.synchronize() first"
            )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes add up to one step, on all ranks.

        Raises:
            Error: between backward and step, while gradients are on the way.
        """
        whole("passes", passes, 1)
        self._check_idle("set_backward_passes_per_step() between backward() and step()")
        if self._reducer is not None:
            self._reducer.passes = passes
            self._reducer.reset()

    def synchronize(self) -> None:
        """Wait until the gradients of all ranks are averaged, to clip them before `step`."""
        if self._reducer is not None:
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
        """Average the gradients over all ranks, and update the parameters.

        Raises:
            WireMismatch: ranks train other parameters, or have other options; on all ranks, before
                anything is updated.
            Error: a gradient was scaled, clipped, zeroed or replaced while it travelled, or
                GradScaler has looked at it then.
        """
        alone = self._reducer is None or self._reducer.state.process_group.size() == 1
        if not (alone or self._skips) and vars(self).pop("found_inf", None) is not None:
            vars(self).pop("grad_scale", None)
            raise Error(
                "GradScaler has looked for overflows in this rank's gradients before they were "
                "averaged, and a fused optimizer may skip a step that others take. Call "
                "optimizer.synchronize() first, and then "
                "with optimizer.skip_synchronize(): scaler.step(optimizer)"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._skips:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): the gradients are averaged a second time. Write "
                    "with optimizer.skip_synchronize(): optimizer.step()",
                    stacklevel=2,
                )
            if self._reducer is not None:
                self._reducer.finish()
        self._synchronized = False
        super().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients; not while they are on the way."""
        self._check_idle("zero_grad() between backward() and step()")
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on all ranks; not while gradients are on the way, in which none are."""
        self._check_idle("add_param_group() between backward() and step()")
        super().add_param_group(param_group)


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
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class that averages gradients over all ranks; collective.

    Args:
        optimizer: any but those whose step calls its closure several times (LBFGS), or that need
            sparse gradients (SparseAdam).
        named_parameters: `model.named_parameters()`, for rules by name; None: numbers.
        compression: Compression.none, fp16, or Compression.codec("int4"), with error feedback.
        backward_passes_per_step: backward passes whose gradients add up on the rank.
        op: Average or Sum.
        gradient_predivide_factor: not used: sums are made in float32, which has room for them.
        num_groups: not used: gradients travel in buckets.
        groups: not used.
        sparse_as_dense: not used: sparse gradients always travel dense.
        process_set: the ranks that average; on others the optimizer is as before.

    The first step compares `op` and `backward_passes_per_step`, which are equal on all ranks.

    Raises:
        ValueError: names are given twice, or not for all parameters.
        WireMismatch: ranks compress differently; on all ranks.
        Error: another `op`, an optimizer that cannot be used or is a DistributedOptimizer already,
            a compressor of one's own, or `init` was not called.

    Example:
        >>> import pycomm.horovod as hvd
        >>> hvd.init()  # doctest: +SKIP
        >>> optimizer = hvd.DistributedOptimizer(  # doctest: +SKIP
        ...     optimizer, model.named_parameters(), compression=hvd.Compression.codec("int4")
        ... )
    """
    typed("optimizer", optimizer, torch.optim.Optimizer)
    if isinstance(optimizer, _Distributed):
        raise Error(
            "this is a DistributedOptimizer already, which would average twice: use it as it is"
        )
    names = _named(optimizer, named_parameters)
    size()
    if op not in (Op.Average, Op.Sum):
        raise Error(f"DistributedOptimizer averages or sums gradients: op=hvd.Average, not {op}")
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise Error(
            f"DistributedOptimizer cannot drive {type(optimizer).__name__}: wrap the model in "
            "DistributedDataParallel instead"
        )
    passes = whole("backward_passes_per_step", backward_passes_per_step, 1)
    check_made(process_set)
    reducer = None
    if process_set.included():
        options = (compression, passes, op, process_set)
        reducer = GradientReducer(optimizer, names, *options)
    # The same object's class changes, so that its state and whoever knows it stay: schedulers do.
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    vars(optimizer).pop("step", None)  # a scheduler's, which calls the former class's
    vars(optimizer).update(
        _reducer=reducer, _parameter_names=names, _synchronized=False, _skips=False
    )
    return optimizer


def _named(
    optimizer: torch.optim.Optimizer,
    given: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[torch.nn.Parameter, str]:
    """Return the names of the optimizer's parameters, and of others that are given."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if given is None:
        return {parameter: f"parameter{n}" for n, parameter in enumerate(own)}
    pairs = list(given)
    names = {parameter: name for name, parameter in pairs}
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("named_parameters has a name twice: pass model.named_parameters()")
    if unnamed := [tuple(p.shape) for p in own if p not in names]:
        raise ValueError(
            f"named_parameters has no name for {len(unnamed)} parameters of the optimizer, the "
            f"first of shape {unnamed[0]}: pass all of model.named_parameters()"
        )
    return names
