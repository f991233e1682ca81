"""Collectives and groups over emulated links, beside Gloo and iperf3.

python -m pycomm.bench links rates     rates of collectives over links, near and far
python -m pycomm.bench links steps     round trips of the steps of a group
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pycomm.bench.common import arguments, tables
from pycomm.bench.common.harness import Origin
from pycomm.bench.common.report import head, line
from pycomm.bench.lab.base import LabUnavailable
from pycomm.bench.lab.jobs import Failed
from pycomm.bench.links import rates, steps

PARTS = {"rates": rates, "steps": steps}


def main(argv: Sequence[str]) -> int:
    program = "python -m pycomm.bench links"
    parser = arguments.Parser(prog=program, description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, part in PARTS.items():
        mine = parts.add_parser(name, description=part.__doc__)
        part.add_options(mine)
        mine.add_argument("--csv", type=Path, help="append the rows to this file")
    options = parser.parse_args(argv)
    part = PARTS[options.part]
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench", "links", *argv]))
    print(head(part.COLUMNS))
    try:
        for row in part.run(options):
            print(line(part.COLUMNS, row), flush=True)
            if options.csv:
                tables.append(options.csv, [row | vars(origin)])
    except (Failed, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except LabUnavailable as error:
        print(f"{program}: the lab cannot be made here: {error}", file=sys.stderr)
        return 2
    return 0
