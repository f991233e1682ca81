"""Result tables: append-only CSV files, and look-ups in them."""

from __future__ import annotations

import csv
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, str]
RESULTS = Path(__file__).parents[1] / "results"


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append rows to a CSV, which is created with its header if it does not exist.

    Raises:
        ValueError: the file has other columns.
    """
    new = not path.exists() or path.stat().st_size == 0
    if not new and list(read(path)[0]) != list(records[0]):
        raise ValueError(f"{path} has other columns than this version writes: use another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        if new:
            writer.writeheader()
        writer.writerows(records)


def newest(rows: Iterable[Row], *columns: str) -> list[Row]:
    """Return the newest of the rows that are equal in these columns, in the order of the first."""
    found: dict[Hashable, Row] = {}
    for row in rows:
        key = tuple(row[column] for column in columns)
        if key not in found or found[key]["time"] <= row["time"]:
            found[key] = row
    return list(found.values())


def widest_run(rows: Sequence[Row], column: str) -> list[Row]:
    """Return the rows of the newest command among those that compare most values of a column."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["command"], []).append(row)
    best = max(runs.values(), key=lambda run: (len({r[column] for r in run}), run[-1]["time"]))
    last = max(row["time"][:10] for row in best)
    return [row for row in best if row["time"].startswith(last)]


def parse_curve(text: str) -> list[tuple[float, float]]:
    """Parse "1:4.5 10:3.2" into pairs of numbers."""
    pairs = (item.split(":") for item in text.split())
    return [(float(x), float(y)) for x, y in pairs]
