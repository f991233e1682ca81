"""Every environment variable that pycomm's Python code reads.

csrc/core/option_table.h has those of the core.
"""

from __future__ import annotations

import difflib
import logging
import os
import shlex
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variable:
    """A row of the table of variables: of `VARIABLES` here, or of `_C.OPTIONS`."""

    name: str
    meaning: str
    default: str
    """For people."""
    parse: Callable[[str], Any] = str
    """Returns the value of a text; raises ValueError. The core parses its own."""
    same: bool = False
    """Whether all ranks must have the same value."""
    option: str = ""
    """The name as an option of a group."""
    page: str = ""
    """Where docs say more."""
    acts: str = ""
    """What heeds it, a key of `log.ABOUT`; "": everything does."""


@dataclass(frozen=True)
class Env:
    """Settings that are read once, at first use: of the table, and of launchers."""

    impl: str = ""
    health: float | None = 60.0
    """Seconds from one comparison of the ranks to the next; None: they are never compared."""
    # TRITON_INTERPRET=1, Triton's own variable: its kernels run on the CPU.
    triton_interpret: bool = False
    # RANK and WORLD_SIZE, as torchrun sets them; None where they are not set.
    rank: int | None = None
    world_size: int | None = None
    # LOCAL_RANK and LOCAL_WORLD_SIZE, torchrun's counts on this machine; read by the doctor only.
    local_rank: int | None = None
    local_world_size: int | None = None
    # PYCOMM_TIMEOUT, a variable of the core: whether it is set.
    timeout_is_set: bool = False


@dataclass(frozen=True)
class AtImport:
    """Settings that _autoload.py reads at the end of every `import torch`."""

    takeover: tuple[str, ...] = ()
    run: str = ""


def _health(text: str) -> float | None:
    if text in ("", "on"):
        return Env.health
    if text == "off":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if 1 <= seconds <= 86400:
        return seconds
    raise ValueError(f"PYCOMM_HEALTH={text!r} is invalid: expected on, off, or 1 to 86400 seconds")


LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
LEVELS["off"] = logging.CRITICAL + 1


def _level(text: str) -> int | None:
    if not text or text in LEVELS:
        return LEVELS.get(text)
    raise ValueError(f"PYCOMM_LOG={text!r} is invalid: expected one of {', '.join(LEVELS)}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


_ROWS = (
    Variable(
        "PYCOMM_LOG",
        "level of pycomm's messages, unless the program sets that of the logger `pycomm`: `debug`, "
        "`info` (all ranks say at the start how they talk), `warning`, `error`, `off`",
        "`info`, at the start of rank 0 alone",
        _level,
    ),
    Variable(
        "PYCOMM_HEALTH",
        "whether the straggler monitor compares ranks: `on` (once a minute), `off`, or seconds "
        "between comparisons, 1 to 86400",
        "`on`",
        _health,
        page="monitor.md",
        acts="group",
    ),
    Variable(
        "PYCOMM_IMPL",
        "codec implementation, which must then work: `native`, `nvrtc`, `triton`, `reference`; "
        "where the core codes, it is `native`",
        "the first that is available",
        acts="codecs",
    ),
    Variable(
        "PYCOMM_TAKEOVER",
        "names of backends that pycomm answers for, such as `gloo,nccl`; read at `import torch`",
        "none",
        _names,
        same=True,
    ),
    Variable(
        "PYCOMM_RUN",
        "options of `python -m pycomm.run`, for processes that another launcher starts; read at "
        "`import torch`",
        "none",
    ),
    Variable(
        "DDP_DISABLE_COMM_MEM",
        "torch's: `1` keeps DDP's buckets out of the group's shared memory",
        "`0` once a pycomm group exists",
    ),
)
VARIABLES = {row.name: row for row in _ROWS}


def _read(name: str) -> Any:
    return VARIABLES[name].parse(os.environ.get(name, ""))


def at_import() -> AtImport:
    """Return the settings that change torch's behaviour. Not cached: scripts set variables, too."""
    return AtImport(takeover=_read("PYCOMM_TAKEOVER"), run=_read("PYCOMM_RUN"))


def log_level() -> int | None:
    """Return the level of PYCOMM_LOG; None: it is not set. Not cached: scripts set it, too."""
    level: int | None = _read("PYCOMM_LOG")
    return level


def run_options(text: str) -> list[str]:
    """Return the options that PYCOMM_RUN holds.

    Raises:
        ValueError: it is no command line.
    """
    try:
        return shlex.split(text)
    except ValueError as error:  # such as "No closing quotation"
        raise ValueError(f"{error} in its text") from None


def hand_on_run(options: Sequence[str]) -> None:
    """Set PYCOMM_RUN for the child processes of this one."""
    os.environ["PYCOMM_RUN"] = shlex.join(options)


def let_groups_allocate_buckets() -> None:
    """Let DDP allocate its buckets from its process group, unless the user has decided otherwise.

    The variable is torch's own and off by default. With it DDP calls the group's allocate_tensor();
    pycomm's returns memory that the ranks of a host share, in which an all-reduce copies nothing.
    """
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")


def variables_of_rank(rank: int, size: int) -> dict[str, str]:
    """Return the environment of a rank that is started on this machine, as torchrun sets it."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return dict(os.environ) | {name: str(value) for name, value in names.items()}


def everything() -> dict[str, str]:
    """Return all variables, for `launch`, which reads those of Slurm and MPI."""
    return dict(os.environ)


def set_missing(variables: Mapping[str, str]) -> None:
    """Set variables that are not set, for this process and its children."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    env.cache_clear()


PREFIX = "PYCOMM_"
# Variables whose values are neither shown nor sent.
SECRETS = ("PYCOMM_SECRET",)


# Variables that setup.py reads, and the beginning of those that tests read.
BUILD = (
    "PYCOMM_BUILD",
    "PYCOMM_CUDA",
    "PYCOMM_CUDA_ARCH",
    "PYCOMM_SANITIZE",
    "PYCOMM_TORCH",
    "PYCOMM_TORCHES",
)
OF_TESTS = "PYCOMM_TEST_"


# Advice on variables of earlier versions, by what follows the prefix.
REMOVED = {
    "RATE": "set PYCOMM_LINK=100mbit/100mbit, what is sent and received",
    "SECRET_FILE": "set PYCOMM_SECRET=file:PATH",
    "CHECKSUM": "payloads that leave a host are checked",
    "SPIN": "waits follow from the number of cores",
    "TRACE_SIZE": "a trace keeps 2048 operations",
}


def guess(name: str, known: Collection[str]) -> str:
    """Return advice on a variable that nothing reads."""
    if removed := REMOVED.get(name.removeprefix(PREFIX)):
        return f"it was removed: {removed}"
    near = difflib.get_close_matches(name, [*known, *BUILD], 1)
    return f"did you mean {near[0]}? Else unset it" if near else "unset it"


def misspelt(known: Collection[str]) -> dict[str, str]:
    """Return advice on each variable that starts with pycomm's prefix and that nothing reads.

    Args:
        known: the names of the tables.
    """
    unknown = sorted({name for name in os.environ if name.startswith(PREFIX)} - {*known, *BUILD})
    return {name: guess(name, known) for name in unknown if not name.startswith(OF_TESTS)}


def given(*others: str) -> dict[str, str]:
    """Return the variables that are set and start with pycomm's prefix, and those in `others`.

    Of a secret the result says only that there is one.
    """
    names = [name for name in os.environ if name.startswith(PREFIX) or name in others]
    values = {name: os.environ[name] for name in sorted(names)}
    return values | {name: "(a secret)" for name in SECRETS if values.get(name)}


def with_only(*names: str) -> dict[str, str]:
    """Return the environment without pycomm's variables, except for those named."""
    return {k: v for k, v in os.environ.items() if k in names or not k.startswith(PREFIX)}


@cache
def env() -> Env:
    """Return the environment's settings."""
    return Env(
        impl=_read("PYCOMM_IMPL"),
        health=_read("PYCOMM_HEALTH"),
        triton_interpret=os.environ.get("TRITON_INTERPRET") == "1",
        rank=_number("RANK"),
        world_size=_number("WORLD_SIZE"),
        local_rank=_number("LOCAL_RANK"),
        local_world_size=_number("LOCAL_WORLD_SIZE"),
        timeout_is_set=bool(os.environ.get("PYCOMM_TIMEOUT")),
    )


def cache_home() -> Path:
    """Return the user's folder of caches: XDG_CACHE_HOME, or ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of XDG says that a relative path counts as none.
    if os.path.isabs(given):
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # no HOME, and a uid without an account, as containers may have
        return Path("/nonexistent/.cache")  # which nobody can write


def place() -> tuple[int | None, int | None, int | None]:
    """Return RANK, WORLD_SIZE and LOCAL_WORLD_SIZE alone; None where they are not set."""
    return _number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_WORLD_SIZE")


def host() -> str:
    """Return a text that processes of one host have in common, and those of others have not."""
    # The boot id differs between hosts of one name, and is the same in all containers of a host.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def refused() -> dict[str, str]:
    """Return the error of each variable of `env` that has an invalid value, by its name."""
    found = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *VARIABLES):
        try:
            _read(name) if name in VARIABLES else _number(name)
        except ValueError as error:
            found[name] = str(error)
    return found


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not an integer") from None
