"""Notes on errors: which case of a test, or which rank, an error is of.

A test of its own costs 2 ms in a worker, and a part of that in the collection of each worker, so
cases that take less run in a loop, each within `noting`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Add a note to every error that leaves the block; pytest shows it below the traceback."""
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(what)
        raise
