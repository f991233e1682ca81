"""Runs an unmodified training script over pycomm, with compressed gradients if asked.

    torchrun --nproc-per-node 2 -m pycomm.run --codec int4 train.py --its --own --arguments
    torchrun --nproc-per-node 2 -m pycomm.run --codec int4 -m package.train --its --own --arguments

Two things change before the script starts. Its process groups are pycomm groups, whether it asks
for "gloo", for "nccl" (without a GPU) or for nothing, and go by the name that it asked for
(takeover.py). And every DistributedDataParallel compresses its gradients, from its construction on,
and every model in fully_shard (FSDP2), from its first forward on.
All else is as `python train.py` has it: `sys.argv`, `sys.path`, `__main__`, traceback, exit status.

Processes that the script starts do the same: they find the options in PYCOMM_RUN. Set by hand, it
serves launchers that leave no room for a command: `PYCOMM_RUN="--codec int4" accelerate launch ...`
"""

from __future__ import annotations

import argparse
import builtins
import functools
import importlib.util
import io
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycomm import _autoload, takeover
from pycomm.compress import compress
from pycomm.env import at_import, hand_on_run
from pycomm.policy import PROTECT, Policy, Rule, usual_feedback

logger = logging.getLogger("pycomm")

AS_ASKED = "script"  # for --backend: what the script says


@dataclass
class Compression:
    """What happens to every DistributedDataParallel and fully_shard; None: nothing."""

    policy: Policy | None = None
    feedback: bool | str = True
    seed: int = 0


_compression = Compression()

# ---------------------------------------------------------------- the command line


class _Parser(argparse.ArgumentParser):
    """Raises: a wrong PYCOMM_RUN must not end a process in the middle of `import torch`."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _Once(argparse.Action):
    """An option that may be given once: two words for one thing would hide a mistake."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice: {getattr(namespace, self.dest)} and {values}")
        setattr(namespace, self.dest, values)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m pycomm.run",
        description=__doc__,
        usage="%(prog)s [options] (script.py | -m module) [its arguments]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--codec", action=_Once, help='of gradients: "int4", "auto"; else exact')
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=CODEC",
        help='for parameters of these names: "*.head.*=int8"; the first that matches counts',
    )
    parser.add_argument("--no-feedback", action="store_true", help="forget what codecs lose")
    parser.add_argument("--seed", type=int, action=_Once, help="of random rounding")
    parser.add_argument(
        "--backend",
        action=_Once,
        help="of the script's process groups: pycomm (default), another one such as gloo, "
        f'or "{AS_ASKED}" for what the script asks for',
    )
    parser.add_argument("--verbose", action="store_true", help="tell what is done, on stderr")
    return parser


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part our options from the script and its arguments, at the first word that is not ours."""
    valued = {
        option
        for action in _parser()._actions
        if action.nargs != 0
        for option in action.option_strings
    }
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        at += 2 if words[at] in valued else 1
    rest = at + (words[at : at + 1] == ["--"])
    return list(words[:at]), list(words[rest:])


def apply(options: Sequence[str]) -> None:
    """Change what process groups and models of this process do; the last call counts.

    Args:
        options: ours alone, as on the command line.

    Raises:
        ValueError: they are wrong; the text says how.
    """
    global _compression
    parser = _parser()
    given = parser.parse_args(options)
    rules = []
    for text in given.rule:
        pattern, equals, spec = text.rpartition("=")
        # A codec's options hold "=", too: "head.*=quant:bits=8".
        pattern, equals, spec = text.partition("=") if ":" in pattern else (pattern, equals, spec)
        if not pattern or not spec:
            parser.error(f"--rule takes PATTERN=CODEC, not {text!r}")
        rules.append((pattern, spec))
    if given.codec is None and (rules or given.no_feedback or given.seed is not None):
        parser.error("--rule, --no-feedback and --seed are about compression: give a --codec")
    policy = None
    feedback: bool | str = not given.no_feedback
    if given.codec is not None:
        if feedback:
            feedback = usual_feedback(given.codec) or True
        chosen = (Rule(codec=spec, name=name, reason=f"--rule {name}") for name, spec in rules)
        policy = replace(Policy.of(given.codec), rules=(*chosen, *PROTECT))
    backend = (given.backend or "pycomm").lower()
    if backend not in (AS_ASKED, *dist.Backend.backend_list) or backend in ("undefined", "fake"):
        known = sorted(set(dist.Backend.backend_list) - {"undefined", "fake"})
        parser.error(f"--backend {given.backend}: use one of {', '.join([*known, AS_ASKED])}")

    if backend != "pycomm" and backend in at_import().takeover:
        parser.error(
            f"--backend {backend} asks for torch's own, and PYCOMM_TAKEOVER names it for pycomm: "
            "leave one of them out"
        )

    if given.verbose and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("pycomm: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    _autoload.register()
    if backend != AS_ASKED:
        # Tensors on a GPU stay with NCCL.
        names = ["gloo"] if torch.cuda.is_available() else ["gloo", "nccl"]
        takeover.install(names, backend)
    _compression = Compression(policy, feedback, given.seed or 0)
    if policy is not None:
        _compress_every_ddp()
        _compress_every_fsdp()


# ------------------------------------------------------------------------ what changes


def _compress_every_ddp() -> None:
    """Let every DistributedDataParallel compress its gradients from its construction on."""
    if hasattr(DistributedDataParallel.__init__, "_pycomm"):
        return
    construct = DistributedDataParallel.__init__
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(construct)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        given = _compression
        if given.policy is not None:
            compress(self, given.policy, feedback=given.feedback, seed=given.seed)
            vars(self)["_pycomm"] = True

    @functools.wraps(register)
    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Any) -> None:
        if vars(self).get("_pycomm"):
            name = getattr(hook, "__qualname__", repr(hook))
            logger.warning("run: the script's hook %s is left out: --codec takes its place", name)
            return
        register(self, state, hook)

    vars(__init__)["_pycomm"] = True
    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]


def _compress_every_fsdp() -> None:
    """Let what fully_shard has wrapped compress its gradients from its first forward on.

    Only then is it known which module is the root, from which parameters have their names.
    """
    from torch.distributed import fsdp

    if hasattr(fsdp.fully_shard, "_pycomm"):
        return
    original = fsdp.fully_shard

    @functools.wraps(original)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = original(module, *args, **kwargs)
        if _compression.policy is not None:
            for part in module if isinstance(module, (list, tuple)) else [module]:
                part.register_forward_pre_hook(_compress_root, prepend=True)
        return wrapped

    vars(fully_shard)["_pycomm"] = True
    fsdp.fully_shard = fully_shard


def _compress_root(module: nn.Module, _: object) -> None:
    """The forward hook of every module in fully_shard: the first to be called is the root."""
    given = _compression
    if vars(module).get("_pycomm") or given.policy is None:
        return
    for part in module.modules():
        vars(part)["_pycomm"] = True
    compress(module, given.policy, feedback=given.feedback, seed=given.seed)


# ------------------------------------------------------------------------ as python does


def _load(script: str) -> tuple[CodeType, ModuleType]:
    """Compile a script and make the `__main__` that python would make for it."""
    path = Path(script).absolute()
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    return code, _main_module(str(path), None, SourceFileLoader("__main__", str(path)))


def _find(name: str) -> tuple[CodeType, ModuleType]:
    """The same for `-m name`; of a package it is the module `__main__` in it."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise ValueError(f"-m {name}: {error}") from None
    loader = spec.loader if spec else None
    code = loader.get_code(spec.name) if spec and isinstance(loader, InspectLoader) else None
    if spec is None or spec.origin is None or code is None:
        raise ValueError(f"-m {name}: there is no such module that can be run")
    module = _main_module(spec.origin, spec, spec.loader)
    module.__package__ = spec.parent
    return code, module


def _main_module(file: str, spec: ModuleSpec | None, loader: Any) -> ModuleType:
    module = ModuleType("__main__")
    vars(module).update(__file__=file, __cached__=None, __spec__=spec, __loader__=loader)
    vars(module).update(__builtins__=builtins)
    return module


def _hide_our_frames() -> None:
    """Let tracebacks begin in the script."""
    show = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        while trace is not None and (
            trace.tb_frame.f_code.co_filename == __file__
            or trace.tb_frame.f_globals.get("__name__") == "runpy"
        ):
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook


def main() -> None:
    """Entry point of ``python -m pycomm.run``."""
    options, words = split(sys.argv[1:])
    try:
        apply(options)
        as_module = words[:1] == ["-m"]
        words = words[as_module:]
        if not words:
            raise ValueError("there is nothing to run: name a script, or a module after -m")
        if not as_module and not Path(words[0]).is_file():
            raise ValueError(f"there is no script {words[0]}")
        found = _find(words[0]) if as_module else None
    except ValueError as error:
        _parser().print_usage(sys.stderr)
        print(f"pycomm.run: {error}", file=sys.stderr)
        sys.exit(2)
    hand_on_run(options or ["--backend", "pycomm"])
    _hide_our_frames()
    if found is None and not getattr(sys.flags, "safe_path", False):
        # `-m` has put the current folder there, and a script expects its own.
        sys.path[0] = str(Path(words[0]).resolve().parent)
    code, module = found or _load(words[0])
    sys.argv = [str(module.__file__) if as_module else words[0], *words[1:]]
    sys.modules["__main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    # By its own name, under which others know it.
    importlib.import_module("pycomm.run").main()
