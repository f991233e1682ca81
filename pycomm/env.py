"""Every environment variable that pycomm's Python code reads; csrc/core/env.h has the core's."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Env:
    """Settings that are read once, at first use."""

    # PYCOMM_IMPL: the codec implementation to use: native, nvrtc, triton or reference; it must
    # then work or raise. Empty: the first of these that is available.
    impl: str = ""
    # PYCOMM_BACKEND: "auto", or the process group's implementation: "binary" (compiled against
    # torch, now if need be) or "python"; see backend/choice.py. Ranks may differ.
    backend: str = "auto"
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
    # PYCOMM_HEALTH: "on", "off", or seconds from one comparison of the ranks to the next, 1 to
    # 86400; None: they are never compared. docs/monitor.md.
    health: float | None = 60.0


@dataclass(frozen=True)
class AtImport:
    """Settings that _autoload.py reads at the end of every `import torch`."""

    # PYCOMM_TAKEOVER: names of backends that pycomm replaces, such as "gloo,nccl"; see takeover.py.
    takeover: tuple[str, ...] = ()
    # PYCOMM_RUN: options of `python -m pycomm.run`, for processes that another launcher starts.
    run: str = ""


def at_import() -> AtImport:
    """Return the settings that change torch's behaviour. Not cached: scripts set variables, too."""
    names = os.environ.get("PYCOMM_TAKEOVER", "").split(",")
    return AtImport(
        takeover=tuple(name.strip() for name in names if name.strip()),
        run=os.environ.get("PYCOMM_RUN", ""),
    )


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


def given(*others: str) -> dict[str, str]:
    """Return the variables that are set and start with pycomm's prefix, and those in `others`.

    Of a secret the result says only that there is one.
    """
    names = [name for name in os.environ if name.startswith(PREFIX) or name in others]
    values = {name: os.environ[name] for name in sorted(names)}
    return values | {name: "(a secret)" for name in SECRETS if values.get(name)}


def proofs_of_secrets(salt: bytes) -> dict[str, str]:
    """Return, for each secret that is set, a text by which ranks see whether theirs are equal.

    scrypt with 16 MiB and 50 ms for each guess (RFC 7914), so that who reads the texts learns no
    secret that is worth the name.

    Args:
        salt: 16 random bytes, the same on all ranks, new for each comparison.
    """
    secrets = {name: os.environ[name].encode() for name in SECRETS if os.environ.get(name)}
    return {
        name: hashlib.scrypt(secret, salt=salt, n=2**14, r=8, p=1, dklen=16).hex()
        for name, secret in secrets.items()
    }


def with_only(*names: str) -> dict[str, str]:
    """Return the environment without pycomm's variables, except for those named."""
    return {k: v for k, v in os.environ.items() if k in names or not k.startswith(PREFIX)}


@cache
def env() -> Env:
    """Return the environment's settings."""
    return Env(
        impl=os.environ.get("PYCOMM_IMPL", ""),
        backend=_backend(os.environ.get("PYCOMM_BACKEND", "")),
        triton_interpret=os.environ.get("TRITON_INTERPRET") == "1",
        rank=_number("RANK"),
        world_size=_number("WORLD_SIZE"),
        local_rank=_number("LOCAL_RANK"),
        local_world_size=_number("LOCAL_WORLD_SIZE"),
        timeout_is_set=bool(os.environ.get("PYCOMM_TIMEOUT")),
        health=_health(os.environ.get("PYCOMM_HEALTH", "")),
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


def refused() -> dict[str, str]:
    """Return the error of each variable of `env` that has an invalid value, by its name."""
    found = {}
    checked: dict[str, Callable[[str], object]] = {
        "PYCOMM_HEALTH": _health,
        "PYCOMM_BACKEND": _backend,
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *checked):
        try:
            checked[name](os.environ.get(name, "")) if name in checked else _number(name)
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


def _backend(text: str) -> str:
    if text in ("", "auto", "binary", "python"):
        return text or "auto"
    raise ValueError(f"PYCOMM_BACKEND={text!r} makes no sense: want auto, binary or python")


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
    raise ValueError(f"PYCOMM_HEALTH={text!r} makes no sense: want on, off, or 1 to 86400 seconds")
