"""The benchmarks' command line.

python -m pycomm.bench all_reduce -b 8 -e 128M -f 4 -p 2 --backend pycomm,gloo
python -m pycomm.bench codecs
python -m pycomm.bench training --models demo --rates 100mbit
python -m pycomm.bench report
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from pycomm.bench.arguments import unknown
from pycomm.bench.operations import OPERATIONS

# Subcommands, and what they do; the rest are collectives.
SUBCOMMANDS = {
    "codecs": ("codecs", "each codec on one core, beside memcpy"),
    "report": ("report_page", "all figures as one interactive page, from bench/results"),
    "training": ("time_to_loss", "steps and losses of real models with each codec, and torch's"),
}
OLDER_NAMES = {"time_to_loss": "training"}
HELP = f"""usage: python -m pycomm.bench OP [options]

Collectives, in nccl-tests' words; backends take turns iteration by iteration:
  {", ".join(OPERATIONS)}

Other measurements:
{chr(10).join(f"  {word:<10} {what}" for word, (_, what) in SUBCOMMANDS.items())}

python -m pycomm.bench OP --help has the options of each; docs/bench.md the columns."""


def main(argv: Sequence[str]) -> int:
    word = OLDER_NAMES.get(argv[0], argv[0]) if argv else "--help"
    if word in ("-h", "--help"):
        print(HELP)
        return 0
    if word in SUBCOMMANDS:
        run: Callable[[list[str]], int]
        run = import_module(f"pycomm.bench.{SUBCOMMANDS[word][0]}").main  # these need torch
        return run(list(argv[1:]))
    if not word.startswith("-") and word not in OPERATIONS:
        known = [*OPERATIONS, *SUBCOMMANDS]
        print(f"python -m pycomm.bench: {unknown('benchmark', word, known)}", file=sys.stderr)
        return 2
    from pycomm.bench import collectives

    return collectives.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
