"""Messages for people: all go through the logger "pycomm", by which a program silences them.

    logging.getLogger("pycomm").setLevel(logging.ERROR)

Where a program has configured no logging, messages of level INFO and above go to standard error.
PYCOMM_LOG is the level for a program that sets none.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from pycomm.env import PREFIX, VARIABLES, Variable, env, given, log_level, misspelt

logger = logging.getLogger("pycomm")


class _StandardError(logging.Handler):
    """Writes records where no other handler gets them."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _configured() and _can_write():
            with suppress(OSError):  # of a full disk, or of a pipe that nobody reads any more
                sys.stderr.write(f"pycomm: {self.format(record)}\n")
                sys.stderr.flush()


def _can_write() -> bool:
    """Return whether standard error is open: what cannot be written fails again at exit."""
    if sys.stderr is None or getattr(sys.stderr, "closed", False):
        return False
    try:
        number = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # it is no file
        return True
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


_standard_error = _StandardError()
logger.addHandler(_standard_error)


def _configured() -> bool:
    """Return whether a program has set a handler for these messages."""
    if any(handler is not _standard_error for handler in logger.handlers):
        return True
    return logger.propagate and bool(logging.root.handlers)


def set_level() -> None:
    """Apply PYCOMM_LOG, unless the program has set a level.

    Raises:
        ValueError: it is no level.
    """
    level = log_level()
    if level is not None and logger.level == logging.NOTSET:
        logger.setLevel(level)


with suppress(ValueError):  # `begin` raises it
    set_level()


def tell(text: str) -> None:
    """Log a line at level INFO, which is shown where logging is not configured."""
    if logger.level != logging.NOTSET or _configured():
        logger.info("%s", text)
    elif logger.manager.disable < logging.INFO:
        logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))


# ------------------------------------------------------------------ at the start of a group


ABOUT = {
    "group": "groups of the backend pycomm",
    "tcp": "TCP, which PYCOMM_TRANSPORT=tcp chooses",
    "codecs": "codecs that Python runs",
}
"""What heeds an option: the texts for the values of `Variable.acts`."""

_begun = False
_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning that this process has not logged before."""
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)


def begin(rank: int, how: str, chosen: Collection[str]) -> None:
    """Say at the start what this job runs on, and which variables it ignores.

    The first group of the process is described, by rank 0 alone unless PYCOMM_LOG is `info`. The
    first rank of each host names variables that nothing reads and those that this group ignores.

    Args:
        rank: of this process in the group.
        how: one line that describes the group.
        chosen: what the group has: "group", if its backend is pycomm, and its transports.
    """
    global _begun
    if _begun:
        return
    _begun = True
    set_level()
    if rank == 0 or logger.isEnabledFor(logging.INFO):
        tell(f"{_versions()}; rank {rank} of {how}")
    if rank == 0 or env().local_rank == 0:
        for name, advice in misspelt(_rows()).items():
            warn_once(f"nothing reads {name}: {advice}")
        ignore(chosen, ("group", "tcp"), how)


def ignore(chosen: Collection[str], among: Collection[str], how: str) -> None:
    """Warn of variables that are set and that what was chosen ignores.

    Args:
        chosen: keys of `ABOUT`: what was chosen.
        among: the keys of those that were to choose from.
        how: one line that describes what was chosen.
    """
    rows, shown = _rows(), given()
    for name, value in shown.items():
        acts = rows[name].acts if value and name in rows else ""
        if acts in among and acts not in chosen and value != str(_default(rows[name].option)):
            about = "group" if acts == "tcp" and "group" not in chosen else acts
            warn_once(f"{name}={value} has no effect here ({how}): it is for {ABOUT[about]}")


def _rows() -> Mapping[str, Variable]:
    from pycomm import _C

    core = (Variable(**row) for row in _C.OPTIONS)
    return {row.name: row for row in core if row.name.startswith(PREFIX)} | VARIABLES


def _default(option: str) -> Any:
    from pycomm import _C

    return getattr(_C.GroupOptions(), option) if option else ""


def _versions() -> str:
    import pycomm

    torch = sys.modules.get("torch")
    return f"version {pycomm.__version__}" + (f", torch {torch.__version__}" if torch else "")
