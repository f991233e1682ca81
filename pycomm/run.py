"""Launcher: runs an unmodified training script over pycomm, with compressed gradients if asked.

    torchrun --nproc-per-node 2 -m pycomm.run --codec int4 train.py --its --own --arguments
    torchrun --nproc-per-node 2 -m pycomm.run --codec int4 -m package.train --its --own --arguments

Two things change before the script starts. Its process groups become pycomm groups, whether it asks
for "gloo", for "nccl" (without a GPU) or for no backend, and keep the name that it asked for
(takeover.py). Gradients are compressed: those of every DistributedDataParallel from its
construction on, those of every model in fully_shard (FSDP2) from its first forward on, and those of
DeepSpeed's engine and Megatron-Core's DistributedDataParallel.
All else is as with `python train.py`: `sys.argv`, `sys.path`, `__main__`, exit status.
Under `srun` and `mpirun` the script finds the variables that torchrun would have set (launch.py).

Processes that the script starts read the same options from PYCOMM_RUN. Set it by hand for launchers
that have no place for a command: `PYCOMM_RUN="--codec int4" accelerate launch ...`
"""

from __future__ import annotations

import argparse
import functools
import importlib
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from pycomm import monitor, takeover
from pycomm.compression import compress, compress_late
from pycomm.env import at_import, hand_on_run
from pycomm.errors import Error
from pycomm.hooks.construction import after_construction
from pycomm.launch import launch_env
from pycomm.log import logger
from pycomm.policy import PROTECT, Policy, Rule

_policy: Policy | None = None
"""Of every DistributedDataParallel and fully_shard; None: no compression."""

# ---------------------------------------------------------------- the command line


class _Parser(argparse.ArgumentParser):
    """A parser that raises, so that a wrong PYCOMM_RUN does not end a process in `import torch`."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m pycomm.run",
        description=__doc__,
        usage="%(prog)s [options] (script.py | -m module) [its arguments]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--codec", help='of gradients: "int4", "auto"; else exact')
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=CODEC",
        help='for parameters of these names: "*head.*=int8"; the first that matches counts',
    )
    parser.add_argument(
        "--backend",
        choices=("pycomm", "script"),
        default="pycomm",
        help="of the script's process groups: pycomm (default), or what the script asks for",
    )
    return parser


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split our options from the script and its arguments, at the first word that is not ours."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        at += 2 if words[at] in ("--codec", "--rule", "--backend") else 1
    rest = at + (words[at : at + 1] == ["--"])
    return list(words[:at]), list(words[rest:])


def apply(options: Sequence[str]) -> None:
    """Apply options to the process groups and models of this process; the last call counts.

    Args:
        options: our options alone, as on the command line.

    Raises:
        ValueError: an option is wrong; the text explains it.
        Error: srun or mpirun has not told enough, see `launch_env`.
    """
    global _policy
    parser = _parser()
    given = parser.parse_args(options)
    rules = []
    for text in given.rule:
        pattern, _, spec = text.partition("=")  # "head.*=quant:bits=8": no name has a "="
        if not pattern or not spec:
            parser.error(f"--rule takes PATTERN=CODEC, not {text!r}")
        rules.append((pattern, spec))
    if given.codec is None and rules:
        parser.error("--rule is about compression: give a --codec")
    policy = None
    if given.codec is not None:
        first = (Rule(codec=spec, name=name, reason=f"--rule {name}") for name, spec in rules)
        policy = replace(Policy.of(given.codec), rules=(*first, *PROTECT))
    for name, value in launch_env().items():
        logger.info("run: %s=%s, from the launcher's variables", name, value)
    if given.backend == "pycomm":
        # Tensors on a GPU stay with NCCL.
        takeover.install(["gloo"] if torch.cuda.is_available() else ["gloo", "nccl"])
    _policy = policy
    if policy is not None:
        _compress_every_ddp()
        _compress_every_fsdp()
        _compress_other_wrappers()
        _watch_steps()


# ------------------------------------------------------------------------ patches of torch


@functools.cache
def _compress_every_ddp() -> None:
    """Make every DistributedDataParallel compress its gradients from its construction on."""
    after_construction(DistributedDataParallel.__module__, "DistributedDataParallel", _compress_ddp)
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Any) -> None:
        ours = str(getattr(hook, "__module__", "")).startswith("pycomm.")
        if vars(self).get("_pycomm") and not ours:
            name = getattr(hook, "__qualname__", repr(hook))
            logger.warning("run: the script's hook %s is left out: pycomm's takes its place", name)
            return
        register(self, state, hook)

    DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]


def _compress_ddp(model: DistributedDataParallel) -> None:
    if _policy is None or type(model).__module__.startswith("pycomm."):  # it does so itself
        return
    if model.process_group not in c10d._world.pg_map:
        _tell(TORCHFT)
        return
    compress(model, _policy)
    vars(model)["_pycomm"] = True


@functools.cache
def _compress_every_fsdp() -> None:
    """Make models in fully_shard or replicate compress from their first forward on.

    The root module, which gives the parameters their names, is known only then. Scripts may have
    imported both functions already, under several names; both make the one class patched here.
    """
    original = FSDPState.init

    @functools.wraps(original)
    def init(self: FSDPState, modules: Sequence[nn.Module], *args: Any, **kwargs: Any) -> None:
        original(self, modules, *args, **kwargs)  # type: ignore[arg-type]
        if _policy is not None:
            for module in modules:
                module.register_forward_pre_hook(_compress_root, prepend=True)

    FSDPState.init = init  # type: ignore[method-assign]
    compress_late(lambda model: _compress_root(model, None))


@functools.cache
def _compress_other_wrappers() -> None:
    """Make wrappers of other packages compress, which the script may import later."""
    after_construction("deepspeed.runtime.engine", "DeepSpeedEngine", _compress_or_tell)
    module = "megatron.core.distributed.distributed_data_parallel"
    after_construction(module, "DistributedDataParallel", _compress_or_tell)


def _compress_or_tell(model: nn.Module) -> None:
    if _policy is None or dist.get_world_size() == 1:
        return
    try:
        compress(model, _policy)
    except (Error, ValueError) as error:
        _tell(str(error))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _compress_root(module: nn.Module, _: object) -> None:
    """Compress the root: the forward pre-hook of all fully_shard modules, run first on the root."""
    if vars(module).get("_pycomm") or _policy is None:
        return
    for part in module.modules():  # each is compressed once
        vars(part)["_pycomm"] = True
    compress(module, _policy)


# ------------------------------------------------------------------------ scripts and modules


def main() -> None:
    """Entry point of ``python -m pycomm.run``."""
    options, words = split(sys.argv[1:])
    try:
        takeover.install(at_import().takeover)  # torch has done so where pycomm is installed
        apply(options)
        as_module = words[:1] == ["-m"]
        words = words[as_module:]
        if not words:
            raise ValueError("there is nothing to run: name a script, or a module after -m")
    except (ValueError, Error) as error:
        _parser().print_usage(sys.stderr)
        print(f"pycomm.run: {error}", file=sys.stderr)
        sys.exit(2)
    hand_on_run(options or ["--backend", "pycomm"])
    sys.argv = words
    # It stays there after the end, for threads that go on and functions that run at exit.
    module = sys.modules["__main__"] = ModuleType("__main__")
    if as_module:
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]  # what python -m calls
        return
    script = Path(words[0]).absolute()
    if not getattr(sys.flags, "safe_path", False):
        # `-m` has put the current folder there; a script expects its own folder.
        sys.path[0] = str(script.resolve().parent)
    module.__file__ = str(script)
    exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), vars(module))


# ------------------------------------------------------------------ what is not compressed

_STEPS = 3  # optimizer steps, after which a script with several ranks has wrapped its model

NOTHING = (
    "no model of this script is in DistributedDataParallel, fully_shard, or an engine of DeepSpeed "
    "or Megatron whose reductions pycomm replaces: gradients that FullyShardedDataParallel (FSDP1) "
    "or the script's own dist.all_reduce averages travel exactly. Write "
    "model = DistributedDataParallel(model) in place of its all-reduces or of "
    "deepspeed.initialize, fully_shard(model) in place of FSDP1, or "
    "pycomm.LocalSGD(model, every=...) to average parameters now and then. docs/trainers.md has "
    "the line for Accelerate, Lightning and HF Trainer"
)

TORCHFT = (
    "a DistributedDataParallel has a process group of its own, as torchft's has, and a hook that "
    "averages. Use pycomm.torchft.DistributedDataParallel(manager, model, codec=...) in its place; "
    "docs/trainers.md has more"
)

_told: set[str] = set()


@functools.cache
def _watch_steps() -> None:
    """Warn if no model is compressed after a few steps: only its speed would show it."""
    numbers = count(1)

    def stepped(*_: object) -> None:
        if next(numbers) != _STEPS or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if not _told and not monitor.snapshot():
            _tell(NOTHING)

    register_optimizer_step_post_hook(stepped)


def _tell(reason: str) -> None:
    """Warn on the first rank, once for each reason, that gradients are not compressed."""
    if reason not in _told and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning("run: --codec compresses nothing here: %s", reason)
    _told.add(reason)


if __name__ == "__main__":
    # The import makes this run under the module's own name, by which other modules know it.
    importlib.import_module("pycomm.run").main()
