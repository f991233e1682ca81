"""The backend in Python: the process group "pycomm" for a torch that no `_c10d` was compiled for.

It makes the same calls of the core as the one in C++ (csrc/binding/torch), with the same names in
the store and the same bytes on the wire, so ranks of one group may have either. It needs a torch
whose `Backend` can be subclassed in Python, which is 2.14 or newer, and no compiler. What it lacks:
compressed collectives of its own (hooks move the payloads by all-to-all and all-gather), overlap
with work on devices (their tensors go through the host), memory that peers reach in place for
DDP's buckets, and hooks of completion.
"""

from __future__ import annotations

from pycomm.backend.python.backend import Backend
from pycomm.backend.python.options import Options

__all__ = ["Backend", "Options"]
