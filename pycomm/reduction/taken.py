"""Detection of reduced gradients that were thrown away instead of being used by an optimizer.

A residual belongs to the gradients that move the parameters. Some gradients never do: when a GAN's
generator learns, the backward through the discriminator also makes gradients of the discriminator,
which the next `zero_grad` removes. The residuals of such a reduction must be removed with them.

A gradient was thrown away if no optimizer has stepped and nothing has changed the parameter in
place since, and the gradient is None or zero when the next backward reaches it. This is concluded
only for parameters that an optimizer or an in-place change has moved before: loops that write to
``parameter.data`` and replayed CUDA graphs show neither.

If ranks have the same gradients, each parameter is judged by its own gradient, so all ranks decide
alike. A zero shard does not imply that the other shards are zero: with shards, gradients count as
thrown away only if all of them are zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_QUIET_STEPS = 32  # in a row, whose gradients were all used; then the hooks are removed
_UNSEEN_STEPS = 16  # in a row without a visible change: something moves parameters unseen
_SAMPLE = 16  # values that are checked before the whole gradient: most gradients are not zero


class GradientHook:
    """Tells an object of a parameter's next gradient.

    The reference is weak, since parameters outlive a state.

    Args:
        owner: the object, whose `look` is called.
        name: the parameter's name, with which it is called.
    """

    __torch_unserializable__ = True  # torch.save of the parameter leaves the hook out silently

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def __call__(self, _: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.look(self._name)


class DiscardedGradients:
    """Observer of a state's parameters between steps.

    Args:
        names: names of the parameters, by id.
        parameters: parameters by name; the optimizer uses their ``grad``.
        early: a step begins before its backward adds to any gradient, as with FSDP2, where
            gradients are shards.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        parameters: Mapping[str, torch.Tensor],
        *,
        early: bool = False,
    ) -> None:
        self._names, self._parameters, self._early = names, parameters, early
        self._versions: dict[str, int] = {}  # versions when the gradients were reduced
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # since then
        self._moved: set[str] | None = set()  # moved by `_stepped`; None: not looked up yet
        self._tracked: set[str] = set()  # parameters that have been moved before
        # Whether a backward has found a gradient that is not zero, of those that one has reached
        # since the last step; a tensor is read later, so that backward does not wait for a device.
        # None: a step has begun, and its backward finds its own.
        self._found: dict[str, bool | torch.Tensor] | None = {}
        self._elsewhere = False  # other ranks have taken the last step's gradients
        self._handles: list[Any] = []
        self._calm = self._idle = 0
        watching.add(self)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has stepped, this model's or another's."""
        self._stepped.add(optimizer)
        self._moved = None

    def waiting(self, names: Collection[str]) -> set[str]:
        """Return the last step's parameters that nothing has moved yet."""
        if self._elsewhere:
            return set()
        unmoved = self._tracked.intersection(names) - self._all_moved()
        return {name for name in unmoved if not self._changed(name)}

    def begin(self, names: Collection[str]) -> set[str]:
        """Begin a step; return the last step's parameters whose gradients were thrown away.

        Args:
            names: names of the last step's parameters.
        """
        waiting = self.waiting(names)
        if not self._elsewhere:
            self._tracked |= self._all_moved().intersection(names)
            self._tracked.update(
                [name for name in names if name not in self._tracked and self._changed(name)]
            )
        thrown = self._all_gone(waiting)
        self._idle = self._idle + 1 if names and len(waiting) == len(names) else 0
        if self._idle >= _UNSEEN_STEPS:
            self._tracked.clear()
        self._calm = 0 if waiting else self._calm + 1
        if self._calm < _QUIET_STEPS:
            self._arm()
        else:
            self.release()
        self._found = None
        if self._early:
            self._watch(self._parameters)
        return thrown

    def end(self, names: Collection[str], *, elsewhere: bool = False) -> None:
        """End a step.

        Args:
            names: names of its parameters.
            elsewhere: only other ranks use its gradients: Join shadows this rank.
        """
        self._elsewhere = elsewhere
        if not self._early:  # else an optimizer may have stepped in this backward
            self._watch(names)
        self._found = {}

    def _watch(self, names: Iterable[str]) -> None:
        """Begin to look for what moves these parameters."""
        self._versions = {name: self._parameters[name]._version for name in names}
        self._stepped.clear()
        self._moved = set()

    def replaced(self, name: str) -> None:
        """Record that a parameter's tensor was replaced since the last step."""
        self._versions.pop(name, None)  # so it counts as changed

    def look(self, name: str) -> None:
        """Record the state of a parameter's gradient before a backward adds to it."""
        if self._found is None or name in self._found:  # a step has begun, or reached before
            return
        looks = name in self._versions and self.waiting([name])
        self._found[name] = self._held(name) if looks else True

    def _held(self, name: str) -> bool | torch.Tensor:
        """Return whether a parameter has a gradient that is not zero."""
        gradient = self._parameters[name].grad
        if gradient is None:
            return False
        return _holds(gradient) if gradient.is_cpu else gradient.any()

    def _all_moved(self) -> set[str]:
        """Return the parameters of all optimizers that have stepped."""
        if self._moved is None:
            groups = [group for optimizer in self._stepped for group in optimizer.param_groups]
            ids = {id(p) for group in groups for p in group["params"]}
            self._moved = {self._names[i] for i in ids & self._names.keys()}
        return self._moved

    def _changed(self, name: str) -> bool:
        """Return whether the parameter's version has changed, which fused optimizers do not do."""
        return self._parameters[name]._version != self._versions.get(name)

    def _all_gone(self, waiting: set[str]) -> set[str]:
        """Return those of these parameters whose gradients are None or zero."""
        gradients = {name: self._parameters[name].grad for name in waiting}
        gone = {name for name, gradient in gradients.items() if gradient is None}
        there = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        if self._early:
            own = [g.to_local() if isinstance(g, DTensor) else g for g in there.values()]
            zeros = any(part.numel() for part in own) and not any(map(_holds, own))
            return waiting if zeros else gone
        late: dict[str, torch.Tensor] = {}
        for name in there:
            held = (self._found or {}).get(name)
            if held is None and self._handles:  # else it may be that of this backward by now
                held = self._held(name)
            if isinstance(held, torch.Tensor):
                late[name] = held
            elif held is False:
                gone.add(name)
        if late:
            held_there = torch.stack(list(late.values())).tolist()
            gone.update(name for name, one in zip(late, held_there, strict=True) if not one)
        return gone

    def _arm(self) -> None:
        """Add hooks that look at gradients before backward adds to them, unless `early`."""
        if self._early or self._handles:
            return
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_hook(GradientHook(self, name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def release(self) -> None:
        """Remove the hooks from backward."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _holds(gradient: torch.Tensor) -> bool:
    """Return whether a gradient has a value that is not zero."""
    if gradient.numel() > _SAMPLE and gradient.is_contiguous():
        flat = gradient.detach().view(-1)
        if flat[:: flat.numel() // _SAMPLE].any():
            return True
    return bool(gradient.any())


watching: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose `stepped` is called with each optimizer that has taken a step."""


def _tell_all(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for each in list(watching):
        each.stepped(optimizer)


register_optimizer_step_post_hook(_tell_all)
