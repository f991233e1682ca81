"""Contents: what a member has of a model and its optimizer, and how another one takes it over."""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pycomm.errors import Error
from pycomm.policy.names import bare

Form = tuple[str, tuple[int, ...], str]
"""Dtype, shape and type of device of a tensor."""


class StateError(Error, pickle.UnpicklingError):
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
            self.lines.append(f"{role} {name}, {_dtype(tensor)} {shape}")
        self.lines += [f"extra state of module {name!r}" for name in self._extra]
        self._describe_optimizer(names)

    def pack(self) -> tuple[bytes, list[Form], list[torch.Tensor]]:
        """Return everything else than `tensors`: a pickle, and the tensors that it refers to.

        Errors of the optimizer's or a module's own code become the `problem`.
        """
        written, pickler = io.BytesIO(), None

        def write(what: Any, to: io.BytesIO) -> Pickler:
            made = Pickler(to)
            made.dump(what)
            read(to.getvalue(), made.tensors)  # what the others will not read is told now
            return made

        state: Any = None
        try:
            optimizer = None if self._optimizer is None else self._optimizer.state_dict()
            extra = {name: module.get_extra_state() for name, module in self._extra.items()}
            state = plain_numbers({"optimizer": optimizer, "extra": extra})
            pickler = write(state, written)
        except Exception as error:
            entry = unreadable(state, lambda what: write(what, io.BytesIO()))
            self.problem = (
                f"its state cannot be pickled: {entry + ': ' if entry else ''}"
                f"{type(error).__name__}: {error}"
            )
        tensors = pickler.tensors if pickler else []
        for tensor in tensors:
            self._check("a tensor of the optimizer's state", tensor)
        return written.getvalue(), [form(tensor) for tensor in tensors], tensors

    @torch.no_grad()
    def take(
        self,
        values: list[torch.Tensor],
        packed: tuple[bytes, list[Form], list[torch.Tensor]],
    ) -> None:
        """Take over the state of another member.

        Args:
            values: those of `tensors`, on the CPU.
            packed: what `pack` returned there, with the tensors on the CPU.
        """
        pickled, forms, rest = packed
        device = next((tensor.device for tensor in self.tensors), torch.device("cpu"))
        rest = [
            tensor.to(device) if kind == device.type else tensor
            for tensor, (_, _, kind) in zip(rest, forms, strict=True)
        ]
        found = read(pickled, rest)
        match found:
            case {"optimizer": dict() | None, "extra": dict() as extra} if (
                extra.keys() >= self._extra.keys()
            ):
                pass
            case _:
                raise StateError("what another member has sent is no state of a model")
        # The optimizer comes first, since its hooks may raise; then nothing has been changed.
        if self._optimizer is not None:
            self._optimizer.load_state_dict(found["optimizer"])
            keep_dtypes(self._optimizer, found["optimizer"])
        for name, module in self._extra.items():
            module.set_extra_state(found["extra"][name])
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


def read(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Read a pickle that another member has sent: containers, numbers, texts and tensors.

    Args:
        pickled: the pickle.
        tensors: those that it refers to.

    Raises:
        StateError: it has objects of other classes, or it is no pickle that a member writes.
    """
    try:
        for operation, _, _ in pickletools.genops(pickled):
            if operation.name in _UNUSED:
                raise StateError(f"no member writes {operation.name}")
        return _Unpickler(io.BytesIO(pickled), tensors).load()
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"what another member has sent is no state: {type(error).__name__}: {error}"
        ) from error


_UNUSED = ("PUT", "BINPUT", "LONG_BINPUT")
"""Of older protocols. Their number is the size of the table that the reader makes."""


def read_forms(pickled: bytes) -> tuple[bytes, list[Form]]:
    """Read a preface: the pickle of a state, and the forms of the tensors that it refers to.

    Raises:
        StateError: it has something else.
    """
    match read(pickled, []):
        case bytes() as state, list() as forms if all(map(_is_form, forms)):
            return state, forms
    raise StateError("what another member has sent says nothing of its tensors")


def _is_form(given: object) -> bool:
    match given:
        case str() as dtype, tuple() as shape, str():
            numbers = all(type(size) is int and 0 <= size < 2**48 for size in shape)
            return numbers and isinstance(getattr(torch, dtype, None), torch.dtype)
    return False


def empty(form: Form) -> torch.Tensor:
    """Return a tensor on the CPU for the values of one with this form."""
    dtype, shape, _ = form
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")


def form(tensor: torch.Tensor) -> Form:
    return _dtype(tensor), tuple(tensor.shape), tensor.device.type


_HARMLESS = (OrderedDict, set, frozenset, complex, torch.device, torch.Size)


class Pickler(pickle.Pickler):
    """Writes the number of a tensor in its place, and collects the tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Puts tensors in the place of their numbers, and makes no object of a class that could act."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        for known in (*_HARMLESS, *torch.serialization.get_safe_globals()):
            made, path = known if isinstance(known, tuple) else (known, "")
            if f"{module}.{name}" == (path or f"{made.__module__}.{made.__qualname__}"):
                return made
        raise StateError(
            f"unpickling {module}.{name} is not allowed: keep numbers, texts, containers or "
            "tensors in its place, or give it to torch.serialization.add_safe_globals on all ranks"
        )


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


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
