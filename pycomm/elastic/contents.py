"""Contents: what a member has of a model and its optimizer, and how another one takes it over."""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pycomm.errors import Error
from pycomm.policy.exchange import bytes_of
from pycomm.policy.names import bare


class StateError(Error):
    """What another member has sent is no state, or has objects that are not read from members."""


class Contents:
    """The tensors of a model, each once, and whatever else belongs to the state.

    As in a checkpoint, buffers that are not persistent do not belong to it. What modules return as
    ``get_extra_state`` does.

    Args:
        model: the model, wrapped or not.
        optimizer: its optimizer, or None.

    Attributes:
        tensors: parameters and persistent buffers. Tied ones occur once.
        lines: what members must have in common, in readable form.
        problem: why this state cannot be handed over; "": it can.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._extra = {
            bare(name): module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        self.tensors: list[torch.Tensor] = []
        self.lines: list[str] = []
        self.problem = ""
        names: dict[int, str] = {}
        for role, name, tensor in _named(model):
            known = names.setdefault(id(tensor), name)
            if known != name:
                self.lines.append(f"{role} {name}, which is {known}")
                continue
            self._check(f"{role} {name}", tensor)
            self.tensors.append(tensor)
            shape = "not known yet" if is_lazy(tensor) else list(tensor.shape)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.lines.append(f"{role} {name}, {dtype} {shape}")
        self.lines += [f"extra state of module {name!r}" for name in self._extra]
        self._describe_optimizer(names)

    def pack(self) -> tuple[bytes, list[torch.Tensor]]:
        """Return everything else than `tensors`: a text with places for tensors, and these.

        Errors of the optimizer's or a module's own code become the `problem`.
        """
        rest: list[torch.Tensor] = []

        def without_values(entry: Any) -> Any:
            if not isinstance(entry, torch.Tensor):
                return entry
            self._check("a tensor of the optimizer's state", entry)
            rest.append(entry)
            return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

        try:
            optimizer = None if self._optimizer is None else self._optimizer.state_dict()
            extra = {name: module.get_extra_state() for name, module in self._extra.items()}
            state = mapped(plain_numbers({"optimizer": optimizer, "extra": extra}), without_values)
            state["devices"] = [tensor.device.type for tensor in rest]
            if entry := unreadable(state, lambda what: read(write(what))):
                self.problem = (
                    f"no other rank reads {entry} of its state: put a number, a text, a container "
                    "or a tensor in its place, or give its class to "
                    "torch.serialization.add_safe_globals on all ranks"
                )
                return b"", []
            return write(state), rest
        except Exception as error:
            self.problem = f"its state cannot be had: {type(error).__name__}: {error}"
            return b"", []

    @torch.no_grad()
    def take(self, content: torch.Tensor, written: int) -> None:
        """Take over the state of another member.

        Args:
            content: its `pack` and its `tensors`, the `rows_of` each (uint8, CPU).
            written: bytes of the text, without what fills it up.

        Raises:
            StateError: it is no state of this model.
        """
        at, device = 0, next((tensor.device for tensor in self.tensors), torch.device("cpu"))

        def next_bytes(nbytes: int) -> torch.Tensor:
            nonlocal at
            begin, at = at, at + filled_up(nbytes)
            return content[begin : begin + nbytes]

        def next_like(tensor: torch.Tensor) -> torch.Tensor:
            nbytes = tensor.numel() * tensor.element_size()
            return next_bytes(nbytes).view(tensor.dtype).view(tensor.shape)

        def with_values(entry: Any) -> Any:
            if not (isinstance(entry, torch.Tensor) and entry.is_meta):
                return entry
            value = next_like(entry)
            return value.to(device) if next(kinds) == device.type else value

        try:
            state = read(bytes_of(next_bytes(written)))
            values = list(map(next_like, self.tensors))
            kinds = iter(state.pop("devices"))
            state = mapped(state, with_values)
            optimizer, extra = state["optimizer"], state["extra"]
            fits = at == content.numel() and extra.keys() >= self._extra.keys()
            fits &= isinstance(optimizer, dict) == (self._optimizer is not None)
        except Exception as error:
            raise StateError(
                f"what another member has sent is no state: {type(error).__name__}: {error}"
            ) from error
        if not fits:
            raise StateError(
                f"another member has sent {content.numel()} bytes, which are no state of this "
                f"model and its optimizer: {at} were expected"
            )
        # The optimizer comes first, since its hooks may raise; then nothing has been changed.
        if self._optimizer is not None:
            self._optimizer.load_state_dict(optimizer)
            keep_dtypes(self._optimizer, optimizer)
        for name, module in self._extra.items():
            module.set_extra_state(extra[name])
        for mine, value in zip(self.tensors, values, strict=True):
            mine.copy_(value)

    def _describe_optimizer(self, names: dict[int, str]) -> None:
        if self._optimizer is None:
            self.lines.append("no optimizer")
            return
        kind = type(self._optimizer)
        self.lines.append(f"optimizer {kind.__module__}.{kind.__qualname__}")
        for number, group in enumerate(self._optimizer.param_groups):
            members = [names.get(id(parameter), "") for parameter in group["params"]]
            if "" in members:
                self.problem = (
                    f"the optimizer has a parameter that is none of the model's, in its group "
                    f"{number}: pass the model that has all of them"
                )
            self.lines.append(f"the optimizer's group {number} of {', '.join(members)}")

    def _check(self, what: str, tensor: torch.Tensor) -> None:
        """Record an unsupported tensor."""
        if is_lazy(tensor):
            self.problem = f"{what} has no shape yet: run the model once before"
        elif type(tensor) not in (torch.Tensor, nn.Parameter):
            self.problem = (
                f"{what} is a {type(tensor).__name__}, of which each rank may have another part: "
                "use torch.distributed.checkpoint for it"
            )
        elif tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            self.problem = (
                f"{what} is on the device {tensor.device} with the layout {tensor.layout}: only "
                "dense tensors that are in memory can be handed over"
            )
        elif any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            self.problem = f"{what} is expanded, so it cannot be written: make it a clone()"


def mapped(thing: Any, change: Callable[[Any], Any]) -> Any:
    """Return a state with `change` of each entry, in containers of the same types."""
    if type(thing) in (dict, OrderedDict):
        return type(thing)((mapped(k, change), mapped(v, change)) for k, v in thing.items())
    if type(thing) in (list, tuple, set, frozenset):
        return type(thing)(mapped(value, change) for value in thing)
    return change(thing)


def plain_numbers(thing: Any) -> Any:
    """Return a state with numbers of numpy as Python's, which all ranks can read."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return thing
    return mapped(thing, lambda entry: entry.item() if isinstance(entry, numpy.generic) else entry)


def unreadable(state: Any, check: Callable[[Any], Any], name: str = "") -> str:
    """Return the name and the class of the first entry that no other rank would read; "": none.

    Args:
        state: containers, numbers, texts and tensors, or what was given in their place.
        check: function that raises if what it is given cannot be read.
        name: of this part of the state.
    """
    try:
        check(state)
    except Exception:
        pairs: Iterator[tuple[Any, Any]] = iter(())
        if isinstance(state, dict):
            pairs = iter(state.items())
        elif isinstance(state, (list, tuple)):
            pairs = iter(enumerate(state))
        parts = (unreadable(part, check, f"{name}[{key!r}]") for key, part in pairs)
        kind = type(state)
        return next(filter(None, parts), f"{name} {kind.__module__}.{kind.__qualname__}".strip())
    return ""


def write(thing: Any) -> bytes:
    """Return a state as other ranks read it."""
    written = io.BytesIO()
    torch.save(thing, written)
    return written.getvalue()


def read(written: bytes) -> Any:
    """Read a state of another rank: tensors, numbers, texts and containers, and objects of the
    classes that were given to `torch.serialization.add_safe_globals`."""
    return torch.load(io.BytesIO(written), weights_only=True)


def filled_up(nbytes: int) -> int:
    """Return the bytes of a row of so many, which ends where values of any dtype may begin."""
    return -(-nbytes // 16) * 16


def rows_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's values as bytes (uint8, on the CPU), and zeros that fill them up."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().cpu()
    yield flat.view(torch.uint8)
    yield torch.zeros(filled_up(flat.nbytes) - flat.nbytes, dtype=torch.uint8, device="cpu")


def _named(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "parameter", bare(name), parameter
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield "buffer", bare(f"{prefix}.{name}" if prefix else name), buffer


def keep_dtypes(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Undo the casts of `load_state_dict`, which gives states the dtype of their parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in saved["state"].items():
        mine = optimizer.state.get(parameters[number], {}) if isinstance(number, int) else {}
        for key, value in values.items() if isinstance(values, dict) else ():
            loaded = mine.get(key)
            if not isinstance(loaded, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            if loaded.dtype != value.dtype and loaded.shape == value.shape:
                mine[key] = value.to(loaded.device)
