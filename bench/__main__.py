"""The benchmarks' command line.

python -m pycomm.bench all_reduce -b 8 -e 128M -f 4 -p 2 --backend pycomm,gloo
python -m pycomm.bench codecs
python -m pycomm.bench training --models demo
python -m pycomm.bench step --rate 10gbit,1gbit
python -m pycomm.bench report
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from pycomm.bench.common.tables import OtherTable
from pycomm.bench.lab.base import LabUnavailable
from pycomm.bench.lab.jobs import Failed

# Subcommands, and what they do; the rest are collectives.
SUBCOMMANDS = {
    "codecs": ("ops.codecs", "each codec on one core, beside memcpy; bits and errors"),
    "gpu": ("gpu.__main__", "checks and times on a GPU"),
    "links": ("links", "collectives over emulated links, near and far, beside Gloo and iperf3"),
    "peers": ("peers", "time to a loss beside other systems, over the same links"),
    "plan": ("plan", "the planner's predictions beside measurements"),
    "report": ("figures.report", "measures what docs claim, and writes their tables"),
    "step": ("step.__main__", "training steps beside what the link allows"),
    "training": ("training.time_to_loss", "losses of a model with each codec, and torch's"),
}
OPTIONAL = ("matplotlib", "numpy", "torch")
"""packages that are optional, since only some measurements need them"""
HELP = """usage: python -m pycomm.bench OP [options]

Collectives, in nccl-tests' words; backends take turns iteration by iteration:
  {operations}

Other measurements:
{subcommands}

python -m pycomm.bench OP --help has the options of each; docs/bench.md the columns."""


def main(argv: Sequence[str]) -> int:
    return reported(partial(run, argv))


def reported(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; what stops it is told without a traceback."""
    try:
        return command()
    except KeyboardInterrupt:
        said, status = "interrupted", 130
    except Failed as error:
        said, status = str(error), 1
    except LabUnavailable as error:
        said, status = f"the lab cannot be made here: {error}", 2
    except OtherTable as error:
        said, status = str(error), 2
    except OSError as error:
        if error.filename is None:
            raise
        said, status = f"{error.filename}: {error.strerror}", 2
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        how = "" if error.name == "torch" else ': pip install "pycomm[bench]"'
        said, status = f"this needs {error.name}, which is not installed{how}", 2
    print(f"python -m pycomm.bench: {said}", file=sys.stderr)
    return status


def run(argv: Sequence[str]) -> int:
    word = argv[0] if argv else "--help"
    if word in SUBCOMMANDS:
        status: int = import_module(f"pycomm.bench.{SUBCOMMANDS[word][0]}").main(list(argv[1:]))
        return status
    from pycomm.bench.common.arguments import unknown
    from pycomm.bench.ops import collectives
    from pycomm.bench.ops.operations import OPERATIONS

    if word in ("-h", "--help"):
        lines = [f"  {name:<10} {what}" for name, (_, what) in SUBCOMMANDS.items()]
        print(HELP.format(operations=", ".join(OPERATIONS), subcommands="\n".join(lines)))
        return 0
    if not word.startswith("-") and word not in OPERATIONS:
        known = [*OPERATIONS, *SUBCOMMANDS]
        print(f"python -m pycomm.bench: {unknown('benchmark', word, known)}", file=sys.stderr)
        return 2
    return collectives.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
