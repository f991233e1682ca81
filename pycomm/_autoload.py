"""Makes `init_process_group("pycomm")` work without an import of pycomm.

torch loads this through two entry points: `torch.backends` (torch 2.13 and older), at the end of
every `import torch`, which fails if this raises; and `torch.distributed.backends` (newer), when the
name is asked for. So this file only leaves a name with torch; everything else loads when a group is
made, or when a variable of `env.AtImport` asks for it.
"""

from __future__ import annotations

import warnings
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
        _do_what_the_environment_says()
    except Exception:
        # A torch without distributed, or one that has changed: `import torch` must not suffer.
        return


def _do_what_the_environment_says() -> None:
    """Once, since what it does registers us again."""
    global _environment_read
    if _environment_read:
        return
    _environment_read = True
    asked = import_module("pycomm.env").at_import()
    try:
        if asked.takeover:
            import_module("pycomm.takeover").install(asked.takeover)
        if asked.run:
            import_module("pycomm.run").apply(asked.run)
    except (Exception, SystemExit) as error:
        warnings.warn(f"pycomm: {asked} has no effect: {error}", RuntimeWarning, stacklevel=2)


def _create(*args: Any) -> Any:
    return import_module("pycomm.backend").create(*args)
