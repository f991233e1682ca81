"""Figures of a table of your own, or those of README and docs from bench/results.

    python -m pycomm.bench.plot mine.csv   what a command wrote with --csv mine.csv: mine-NAME.png
    python -m pycomm.bench.plot --docs     the figures of README and docs, into docs/img
    python -m pycomm.bench.plot loss       only this one of them
    python -m pycomm.bench.plot --check    says what is out of date, or mixes rows that differ in
                                           more than what is shown; exit status 1 if anything is

A picture holds the digest of the chart that it shows. Whether it is out of date thus depends on the
contents of its table, not on the time of the file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pycomm.bench.common.arguments import Parser, unknown
from pycomm.bench.common.tables import RESULTS
from pycomm.bench.figures.catalogue import FIGURES, Figure, fitting
from pycomm.bench.figures.drawing import digest, picture_digest, save

ROOT = Path(__file__).parent.parent
IMAGES = Path("docs/img")


def pages(root: Path) -> Iterator[Path]:
    """Yield all pages that may show a figure."""
    yield root / "README.md"
    yield from sorted((root / "docs").rglob("*.md"))


def shown(root: Path) -> dict[Path, Path]:
    """Return each image that a page shows, and the first page that does."""
    found: dict[Path, Path] = {}
    for page in pages(root):
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text()):
            if "://" not in link:
                found.setdefault((page.parent / link).resolve(), page)
    return found


def faults(root: Path, figures: Sequence[Figure] = FIGURES) -> list[str]:
    """Return the problems of the committed figures, one sentence each.

    Args:
        root: the root of a checkout.
        figures: the expected figures.
    """
    images = root / IMAGES
    made = {(images / f"{figure.name}.png").resolve(): figure for figure in figures}
    seen = shown(root)
    wrong = []
    for path, page in seen.items():
        if path not in made:
            wrong.append(f"{page.relative_to(root)} shows {path.name}, which nothing makes")
    for path, figure in made.items():
        if path not in seen:
            wrong.append(f"{path.name} is on no page")
        mixed = figure.mixtures(root / "bench/results")
        if mixed:
            wrong += mixed
        elif not path.exists():
            wrong.append(f"{path.name} has not been drawn")
        elif picture_digest(path) != digest(figure.of(root / "bench/results")):
            wrong.append(f"{path.name} shows something else than {figure.table}: draw it again")
    made_names = {path.name for path in made}
    strangers = sorted(p.name for p in images.glob("*") if p.name not in made_names)
    return wrong + [f"{name} lies in {IMAGES}, and nothing makes it" for name in strangers]


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m pycomm.bench.plot", description=__doc__)
    names = [figure.name for figure in FIGURES]
    what = f"a CSV file, or a figure of docs: {', '.join(names)}"
    parser.add_argument("figures", nargs="*", metavar="FILE", help=what)
    parser.add_argument("--docs", action="store_true", help="draw all figures of docs")
    parser.add_argument("--check", action="store_true", help="draw nothing, say what is wrong")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of docs' tables")
    parser.add_argument("--out", type=Path, help="folder for the pictures (a file's own, docs/img)")
    options = parser.parse_args(argv)
    if options.check:
        wrong = faults(ROOT)
        for sentence in wrong:
            print(sentence)
        return 1 if wrong else 0
    files = [name for name in options.figures if name.endswith(".csv") or Path(name).is_file()]
    chosen = names if options.docs else [name for name in options.figures if name not in files]
    for name in chosen:
        if name not in names:
            parser.error(unknown("figure or file", name, names))
    if not files and not chosen:
        parser.error("name a CSV file that a command wrote with --csv, or write --docs")
    try:
        for name in files:
            table = Path(name)
            for figure in fitting(table):
                folder = options.out or table.parent
                _draw(figure, table.parent, folder / f"{table.stem}-{figure.name}.png")
        for figure in FIGURES:
            if figure.name in chosen:
                folder = options.out or ROOT / IMAGES
                _draw(figure, options.results, folder / f"{figure.name}.png")
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    return 0


def _draw(figure: Figure, results: Path, path: Path) -> None:
    save(figure.of(results), path)
    print(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
