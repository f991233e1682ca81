"""Collectives and groups over emulated links, beside Gloo and iperf3.

python -m pycomm.bench links rates     rates of collectives over links, near and far
python -m pycomm.bench links steps     round trips of the steps of a group
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pycomm.bench.common import arguments
from pycomm.bench.common.report import Report
from pycomm.bench.lab.base import LabUnavailable
from pycomm.bench.lab.jobs import Failed
from pycomm.bench.links import rates, steps

PARTS = {"rates": rates, "steps": steps}


def main(argv: Sequence[str]) -> int:
    parser = arguments.Parser(prog="python -m pycomm.bench links", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, part in PARTS.items():
        mine = parts.add_parser(name, description=part.__doc__)
        part.add_options(mine)
        arguments.add_csv(mine)
    options = parser.parse(argv)
    part = PARTS[options.part]
    report = Report(part.COLUMNS, options)
    report.header()
    try:
        for row in part.run(options):
            report.add(row)
    except (Failed, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except LabUnavailable as error:
        print(f"{parser.prog}: the lab cannot be made here: {error}", file=sys.stderr)
        return 2
    return 0
