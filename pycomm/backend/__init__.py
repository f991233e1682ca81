"""The process group "pycomm" for torch.distributed.

Its work is done by `_c10d`, which is compiled against torch (csrc/binding/torch/backend.h).
"""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta
from functools import cache
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.constants import default_pg_timeout

from pycomm import log
from pycomm._build import load_c10d
from pycomm.backend.torch_calls import let_torch_monitor_barriers, let_torch_set_timeouts
from pycomm.env import env, let_groups_allocate_buckets

if TYPE_CHECKING:
    from pycomm._c10d import Backend, Options


def create(given: Any, options: Options | None) -> Backend:
    """Make the backend of one process group; called by torch.

    Args:
        given: torch's DistributedBackendOptions: store, rank, size, timeout, name.
        options: the user's ``pg_options``: ``pycomm.Options`` or None.

    Raises:
        TypeError: options of another type.
        ValueError: PYCOMM_LOG is no level.
        PeerLost: a rank died after it had joined, or is known to the default group as lost.
        Timeout: some ranks did not join; the text names them.
    """
    log.set_level()
    c10d = load_c10d()
    parent = find()
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
    if getattr(given, "enable_reconfigure", False):  # torch 2.14 and later
        options.enable_reconfigure = True
    let_groups_allocate_buckets()
    _note_error_at_exit(os.getpid())
    made: Backend = c10d.Backend(
        given.store,
        given.group_rank,
        given.group_size,
        options,
        given.group_id,
        parent if isinstance(parent, c10d.Backend) else None,
    )
    if not options.enable_reconfigure:  # else it has no members yet
        begin(made)
    return made


@cache
def _note_error_at_exit(_process: int) -> None:
    """Leave an error that multiprocessing has caught where Python leaves uncaught ones: groups look
    for it at the end of the interpreter. torch's `spawn` has made it a SystemExit.
    """

    def note() -> None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = (error.__context__ or error) if error.code else None
        if error is not None:
            sys.last_value = error

    Finalize(None, note, exitpriority=0)


def begin(group: Backend) -> None:
    """Say at the start of a group of several ranks what it runs on, and what it ignores."""
    if group.size() == 1:
        return
    how = group.describe()
    if torch.cuda.is_available():
        how += f"; tensors of GPUs: device_path={group.options.device_path}"
    log.begin(group.rank(), how, ("group", *group.transports))


# As _autoload.py does, which may not be installed.
dist.Backend.register_backend("pycomm", create, extended_api=True, devices=["cpu", "cuda"])


def reducer_wants_reals(backend: Backend) -> bool:
    """Return whether torch's reducer needs real, not complex, memory from a backend for buckets.

    Some versions of torch view buckets of complex parameters as real only if they allocated them
    themselves, and fail on other memory. The backend calls this before it allocates a bucket.
    """
    group = dist.ProcessGroup(_distributed_c10d.HashStore(), 0, 1)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    parameter = torch.zeros(1, dtype=torch.complex64, requires_grad=True, device="cpu")
    try:
        _distributed_c10d.Reducer([parameter], [[0]], [1 << 20], group)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        return True
    return False


def _timeout(given: timedelta, of_options: timedelta) -> timedelta:
    """Return the timeout of a new group.

    The first that was given counts: to `init_process_group` or `new_group`; in ``pycomm.Options``;
    in PYCOMM_TIMEOUT; else torch's 30 minutes. torch fills in its default before this is called, so
    that value counts as not given.
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
    """Return the pycomm backend that moves a group's tensors, or None if another backend does.

    If pycomm moves both CPU and CUDA tensors, one backend does.

    Args:
        group: a process group; None means the default group.
        device: device of the tensors; None: the CPU.

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
    except RuntimeError:  # the group has no backend for such tensors
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return backend if type(backend).__module__ == "pycomm._c10d" else None


def wait(future: torch.futures.Future[Any], group: dist.ProcessGroup | None) -> Any:
    """Wait for a future of a group's operations, and return its value.

    torch's own ``future.wait()`` lets no signal in. Here Ctrl+C, or what else the handler of a
    signal raises, ends the wait, and the group of pycomm with it.
    """
    found = None if future.done() else find(group)
    if found is not None:
        found.wait(future)
    return future.wait()


let_torch_set_timeouts(find)
let_torch_monitor_barriers(find)
