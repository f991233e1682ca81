"""Which implementation of the backend serves the installed torch.

In this order: a `_c10d` that is there and loads (installed, prebuilt in the wheel, or compiled
earlier); the backend in Python, where torch lets Python make one; a `_c10d` that is compiled now.
PYCOMM_BACKEND chooses: "binary" leaves out the second, "python" the others.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from pycomm._build import Absent, load_c10d, ready_c10d
from pycomm.env import env
from pycomm.errors import Error


def load() -> ModuleType:
    """Return the module with the classes `Backend` and `Options` for the installed torch.

    Raises:
        Error: torch is too old, or nothing can serve it; the text says what was tried and why it
            failed.
    """
    wish = env().backend
    if wish == "binary":
        return load_c10d()
    if wish == "python":
        if why := why_not_python():
            raise Error(f"PYCOMM_BACKEND=python has no effect: {why}")
        return _python()
    try:
        return ready_c10d()
    except Absent as absent:
        reason = str(absent)
    why = why_not_python()
    if not why:
        return _python()
    try:
        return load_c10d()
    except Error as error:
        raise Error(
            f"no backend of pycomm can serve this torch. Binaries: {reason}. The backend in "
            f"Python: {why}. Compiling: {error}"
        ) from None


def why_not_python() -> str:
    """Return why this torch has no backends in Python; "" if it has them."""
    import torch
    from torch._C import _distributed_c10d

    class Probe(_distributed_c10d.Backend):  # a class of its own: torch remembers those it has seen
        pass

    try:
        Probe(0, 1)
    except TypeError:
        return f"torch {torch.__version__} does not let Python make one, 2.14 and newer do"
    return ""


def _python() -> ModuleType:
    return import_module("pycomm.backend.python")
