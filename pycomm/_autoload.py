"""Entry points that make `init_process_group("pycomm")` work without an import of pycomm.

torch loads this module through `torch.backends`, at the end of every `import torch`, which fails if
this raises; from 2.14 on also through `torch.distributed.backends`, when the name is requested and
TORCH_DEVICE_BACKEND_AUTOLOAD=0 has kept it from the former. So this file only registers a name with
torch; everything else loads when a group is made, or when a variable of `env.AtImport` requests it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

_environment_read = False


def register(*_: Any, **__: Any) -> None:
    """Register the backend "pycomm" with torch.distributed. Never raises; may be called again."""
    try:
        backend = import_module("torch.distributed").Backend
        # A list: torch would read a string letter by letter. One backend for both devices, because
        # all backends that torch does not know share one place in a group.
        backend.register_backend("pycomm", _create, extended_api=True, devices=["cpu", "cuda"])
        _apply_environment()
    except Exception:
        # torch has no distributed package, or has changed: `import torch` must still work.
        return


def _apply_environment() -> None:
    """Apply the environment variables that act at import, once; may register the backend again."""
    global _environment_read
    if _environment_read:
        return
    _environment_read = True
    env = import_module("pycomm.env")
    asked = env.at_import()
    if asked.takeover:
        _try(
            f"PYCOMM_TAKEOVER={','.join(asked.takeover)!r}",
            'names of backends, such as PYCOMM_TAKEOVER="gloo,nccl"',
            lambda: import_module("pycomm.takeover").install(asked.takeover),
        )
    if asked.run:
        _try(
            f"PYCOMM_RUN={asked.run!r}",
            'options of `python -m pycomm.run`, such as PYCOMM_RUN="--codec int4"',
            lambda: import_module("pycomm.run").apply(env.run_options(asked.run)),
        )


def _try(given: str, form: str, act: Callable[[], Any]) -> None:
    """Warn about a wrong variable instead of raising, so that `import torch` does not fail."""
    try:
        act()
    except (Exception, SystemExit) as error:
        warnings.warn(
            f"pycomm: {given} has no effect: {error}; it takes {form}", RuntimeWarning, stacklevel=3
        )


def _create(*args: Any) -> Any:
    return import_module("pycomm.backend").create(*args)
