"""The process group "pycomm" for torch.distributed; csrc/binding/c10d_backend.h does the work."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from pycomm import _autoload
from pycomm._build import load_c10d
from pycomm.env import env, let_groups_allocate_buckets

if TYPE_CHECKING:
    from pycomm._c10d import Backend, Options

_autoload.register()


def create(given: Any, options: Options | None) -> Backend:
    """Make the backend of one process group. torch calls this.

    Args:
        given: torch's DistributedBackendOptions: store, rank, size, timeout, name.
        options: what the user passed as ``pg_options``: ``pycomm.Options`` or None.

    Raises:
        TypeError: other options than ours.
        PeerLost: a rank died after it had come, or that the default group knows.
        Timeout: some ranks did not come; the text names them.
    """
    c10d = load_c10d()
    if options is None:
        options = c10d.Options()
    elif not isinstance(options, c10d.Options):
        raise TypeError(
            f"pg_options of the pycomm backend must be pycomm.Options, not {type(options).__name__}"
        )
    options = copy.copy(options)
    options._timeout = _timeout(given.timeout, options._timeout)
    options.group_name = given.group_id
    options.global_ranks_in_group = given.global_ranks_in_group
    let_groups_allocate_buckets()
    made: Backend = c10d.Backend(
        given.store, given.group_rank, given.group_size, options, given.group_id, find()
    )
    return made


def _timeout(given: timedelta, of_options: timedelta) -> timedelta:
    """The timeout of a new group: the first that somebody named.

    By `init_process_group` or `new_group`; by ``pycomm.Options``; by PYCOMM_TIMEOUT; else torch's
    30 minutes. torch fills in its default before we see it, so that one counts as not named.
    """
    if given != default_pg_timeout:
        return given
    unnamed = load_c10d().Options()._timeout  # PYCOMM_TIMEOUT, or the core's default
    if of_options != unnamed or env().timeout_is_set:
        return of_options
    return given


def find(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Backend | None:
    """Return the pycomm backend that moves a group's tensors, or None if it is another one.

    Where pycomm moves both, it is the same for CPU and CUDA tensors.

    Args:
        group: a process group; None means the default group.
        device: of the tensors; None: the CPU.

    Example:
        >>> import pycomm.backend, torch.distributed as dist
        >>> dist.init_process_group("pycomm")  # doctest: +SKIP
        >>> pycomm.backend.find().describe()  # doctest: +SKIP
        '2 ranks: shm to 1'
    """
    group = group or dist.group.WORLD
    if group is None:
        return None
    try:
        backend: Any = group._get_backend(device or torch.device("cpu"))
    except RuntimeError:  # a group that has no backend for such tensors
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return backend if type(backend).__module__ == "pycomm._c10d" else None
