"""Takeover: pycomm in place of backends whose names are written into a script or a library.

    PYCOMM_TAKEOVER=gloo,nccl torchrun --nproc-per-node 2 train.py

Every process group that asks for one of these names becomes a pycomm group, whether
`init_process_group`, `new_group` or DeviceMesh makes it. `get_backend` still returns the name that
was asked for, because libraries compare it: Accelerate sends other collectives to "gloo",
`monitored_barrier` refuses every other name. `pycomm.backend.find` returns the actual backend, and
so does the group's own `name()`: torch casts a group that calls itself Gloo there to its own class.
Code that constructs `ProcessGroupGloo` itself, such as torch's debug wrapper, gets Gloo; so does
everything inside `released()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pycomm.log import logger

Make = Callable[..., tuple[Any, Any]]

# Why a name cannot be taken over.
REFUSED = {
    "fake": "it stands for no communication",
    "mpi": "MPI starts its own ranks, so there is nothing to meet by",
    "pycomm": "that is our own name",
    "undefined": "that is torch's word for a backend that was not named; such a group goes to what "
    "torch would take, so name that",
}

_taken: set[str] = set()  # the names that are taken over
_released = ContextVar("pycomm_released", default=False)


def install(names: Iterable[str]) -> None:
    """Let pycomm make the process groups that ask for one of these names.

    May be called again: later names are added.

    Args:
        names: of backends, as `init_process_group` takes them: "gloo", "nccl".

    Raises:
        ValueError: a name cannot be taken over; the text says why.
    """
    wanted = [name.lower() for name in names]
    for name in wanted:
        if name in REFUSED:
            raise ValueError(f"pycomm cannot answer for the backend {name!r}: {REFUSED[name]}")
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not the name of a backend, such as gloo or nccl")
    make: Make = c10d._new_process_group_helper
    if not hasattr(make, "_pycomm"):
        c10d._new_process_group_helper = _answering(make)
    if "nccl" in wanted and vars(c10d).get("default_pg_nccl_timeout") is None:
        # torch without NCCL has no default timeout for it and warns; with NCCL it is this one.
        vars(c10d)["default_pg_nccl_timeout"] = timedelta(minutes=10)
    _taken.update(wanted)


@contextmanager
def released() -> Iterator[None]:
    """Suspend the takeover: inside this context a group that asks for "gloo" is Gloo's.

    Example:
        >>> from pycomm import takeover
        >>> with takeover.released():
        ...     group = dist.new_group(backend="gloo")  # doctest: +SKIP
    """
    token = _released.set(True)
    try:
        yield
    finally:
        _released.reset(token)


def _answering(make: Make) -> Make:
    """Wrap the function through which torch makes every process group."""

    @functools.wraps(make)
    def answer(size: int, rank: int, ranks: Any, backend: str, *args: Any, **kwargs: Any) -> Any:
        asked = _asked(backend)
        given = {d: "pycomm" if name in _taken else name for d, name in asked.items()}
        if given == asked:
            return make(size, rank, ranks, backend, *args, **kwargs)
        for options in ("backend_options", "pg_options"):  # torch has renamed this argument
            module = type(kwargs.get(options)).__module__
            if kwargs.get(options) is not None and not module.startswith("pycomm."):
                logger.info("takeover: %s of %s are left out", options, backend)
                kwargs[options] = None
        text = ",".join(f"{device}:{name}" for device, name in given.items())
        if set(given.values()) == {"pycomm"}:
            text = "pycomm"
        group, store = make(size, rank, ranks, text, *args, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            _rename(group, backend, asked, given)
            logger.info("takeover: %s in place of %s for %s", text, backend, group.group_name)
        return group, store

    vars(answer)["_pycomm"] = True
    return answer


def _asked(backend: str) -> dict[str, str]:
    """Return the backend's name for each device; empty if none of the names is taken over."""
    text = str(backend).lower()
    parts = {part.rpartition(":")[2] for part in text.split(",")}
    if _released.get() or not _taken or (text != "undefined" and parts.isdisjoint(_taken)):
        return {}
    config = c10d.BackendConfig(dist.Backend(text))
    return {device: str(name) for device, name in config.get_device_backend_map().items()}


def _rename(
    group: dist.ProcessGroup, backend: str, asked: dict[str, str], given: dict[str, str]
) -> None:
    """Give a group the name that was asked for, in torch's Python records."""
    devices = [device.type for device in group._device_types]
    # "nccl" is for CUDA tensors; a backend that also takes CPU tensors does so under this name.
    alone = next(iter(asked.values())) if len(set(asked.values())) == 1 else None
    called = {device: asked.get(device, alone) for device in devices}
    _, store = c10d._world.pg_map[group]
    c10d._world.pg_map[group] = (str(backend), store)
    config = ",".join(f"{device}:{name}" for device, name in sorted(called.items()))
    c10d._world.pg_backend_config[group] = config

    if dist.Backend.NCCL not in given.values():
        # torch leaves a group of "cpu:pycomm,cuda:..." without a default.
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
