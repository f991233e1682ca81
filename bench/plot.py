"""Figures of README and docs, from bench/results or from tables of the same names elsewhere.

    python -m pycomm.bench.plot --docs     the figures of README and docs, into docs/img
    python -m pycomm.bench.plot loss       only this one of them
    python -m pycomm.bench.plot loss --results mine --out mine    of mine/demo-cpu.csv
    python -m pycomm.bench.plot --check    says what is out of date, or mixes rows that differ in
                                           more than what is shown; exit status 1 if anything is

A picture holds the digest of the chart that it shows. Whether it is out of date thus depends on the
contents of its table, not on the time of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pycomm.bench.common.arguments import Parser, unknown
from pycomm.bench.common.tables import RESULTS
from pycomm.bench.figures.catalogue import FIGURES, Figure
from pycomm.bench.figures.drawing import digest, picture_digest, save

ROOT = Path(__file__).parent.parent
IMAGES = Path("docs/img")


def faults(root: Path, figures: Sequence[Figure] = FIGURES) -> list[str]:
    """Return the problems of the committed figures, one sentence each.

    Args:
        root: the root of a checkout.
        figures: the expected figures.
    """
    images = root / IMAGES
    made = {images / f"{figure.name}.png": figure for figure in figures}
    wrong = []
    for path, figure in made.items():
        mixed = figure.mixtures(root / "bench/results")
        if mixed:
            wrong += mixed
        elif not path.exists():
            wrong.append(f"{path.name} has not been drawn")
        elif picture_digest(path) != digest(figure.of(root / "bench/results")):
            wrong.append(f"{path.name} shows something else than {figure.table}: draw it again")
    strangers = sorted(path.name for path in images.glob("*") if path not in made)
    return wrong + [f"{name} lies in {IMAGES}, and nothing makes it" for name in strangers]


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m pycomm.bench.plot", description=__doc__)
    names = [figure.name for figure in FIGURES]
    what = f"of docs: {', '.join(names)}"
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=what)
    parser.add_argument("--docs", action="store_true", help="draw all figures of docs")
    parser.add_argument("--check", action="store_true", help="draw nothing, say what is wrong")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--out", type=Path, default=ROOT / IMAGES, help="folder of the pictures")
    options = parser.parse_args(argv)
    if options.check:
        wrong = faults(ROOT)
        for sentence in wrong:
            print(sentence)
        return 1 if wrong else 0
    chosen = names if options.docs else options.figures
    for name in chosen:
        if name not in names:
            parser.error(unknown("figure", name, names))
    if not chosen:
        parser.error("name a figure, or write --docs")
    try:
        for figure in FIGURES:
            if figure.name in chosen:
                path = options.out / f"{figure.name}.png"
                save(figure.of(options.results), path)
                print(path)
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
