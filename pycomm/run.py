"""Runs an unmodified training script over pycomm, with compressed gradients if asked.

    torchrun --nproc-per-node 2 -m pycomm.run --codec int4 train.py --its --own --arguments

Two things change before the script starts. `init_process_group` makes a pycomm group where the
script says nothing, "gloo" or "mpi". And every DistributedDataParallel compresses its gradients,
from its construction on. A script that asks for another backend, such as NCCL, keeps it; there too
compression works.
"""

from __future__ import annotations

import argparse
import functools
import logging
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycomm import _autoload
from pycomm.codecs import codec as parse_codec
from pycomm.compress import compress

logger = logging.getLogger("pycomm")

# Backends for CPU tensors, which ours stands in for.
REPLACED = ("gloo", "mpi")


def take_over_init() -> None:
    """Let `init_process_group` make pycomm groups instead of Gloo's and MPI's."""
    _autoload.register()
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        wanted = str(backend).lower() if backend is not None else None
        unsaid = wanted is None and not torch.cuda.is_available()
        if unsaid or wanted in REPLACED:
            logger.info("run: a pycomm group in place of %s", backend or "the default")
            backend = "pycomm"
        original(backend, *args, **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]


def take_over_ddp(spec: str, feedback: bool, seed: int) -> None:
    """Let every DistributedDataParallel compress its gradients from its construction on."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        compress(self, spec, feedback=feedback, seed=seed)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def arguments() -> argparse.Namespace:
    """Parse the command line; everything after the script belongs to it."""
    parser = argparse.ArgumentParser(prog="python -m pycomm.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--codec", help='codec of gradients, such as "int4"; none if left out')
    parser.add_argument("--no-feedback", action="store_true", help="forget what codecs lose")
    parser.add_argument("--seed", type=int, default=0, help="of random rounding")
    parser.add_argument("script", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args()
    if given.codec is not None:
        try:
            parse_codec(given.codec)
        except ValueError as error:
            parser.error(str(error))
    if not Path(given.script).is_file():
        parser.error(f"there is no script {given.script}")
    return given


def main() -> None:
    """Entry point of ``python -m pycomm.run``."""
    given = arguments()
    take_over_init()
    if given.codec is not None:
        take_over_ddp(given.codec, not given.no_feedback, given.seed)
    sys.argv = [given.script, *given.args]
    sys.path[0] = str(Path(given.script).parent)  # as `python script` has it
    runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    main()
