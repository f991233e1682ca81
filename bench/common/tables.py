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

    A file of an earlier version, which has only some of the columns, gets the others, empty.

    Raises:
        ValueError: the file has a column that the rows do not have.
    """
    columns = list(records[0])
    header: list[str] = []
    if path.exists():
        with path.open(newline="") as file:
            header = next(csv.reader(file), [])
    strange = sorted(set(header) - set(columns))
    if strange:
        raise ValueError(f"{path} has other columns ({', '.join(strange)}): use another file")
    if header != columns:
        write(path, columns, read(path) if header else [])
    with path.open("a", newline="") as file:
        csv.DictWriter(file, columns).writerows(records)


def write(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write a whole table, by way of a temporary file, so that an interruption loses no row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def newest(rows: Iterable[Row], *columns: str) -> list[Row]:
    """Return the newest of the rows that are equal in these columns, in the order of the first."""
    found: dict[Hashable, Row] = {}
    for row in rows:
        key = tuple(row[column] for column in columns)
        if key not in found or found[key]["time"] <= row["time"]:
            found[key] = row
    return list(found.values())


def parse_curve(text: str) -> dict[float, float]:
    """Parse "1:4.5 10:3.2", the values y by their places x."""
    pairs = (item.split(":") for item in text.split())
    return {float(x): float(y) for x, y in pairs}
