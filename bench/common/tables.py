"""Result tables: append-only CSV files, and look-ups in them."""

from __future__ import annotations

import csv
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, str]
RESULTS = Path(__file__).parents[1] / "results"


class OtherTable(ValueError):
    """A file holds something else than the table that is to be in it."""


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def header(path: Path, columns: Iterable[str]) -> list[str]:
    """Return the header of the table to which rows of these columns are to be added.

    It is empty where there is none yet, and for what keeps no rows, such as /dev/null.

    Raises:
        OtherTable: it has a column that the rows do not have, or is a folder.
    """
    if path.is_dir():
        raise OtherTable(f"{path} is a folder: name a file")
    if not path.is_file():
        return []
    try:
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error):
        raise OtherTable(f"{path} holds no table: use another file") from None
    if strange := sorted(set(found) - set(columns)):
        raise OtherTable(f"{path} has other columns ({', '.join(strange)}): use another file")
    return found


def append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append rows to a CSV, which is created with its header if it does not exist.

    A file of an earlier version, which has only some of the columns, gets the others, empty.

    Raises:
        OtherTable: the file has a column that the rows do not have.
    """
    columns = list(records[0])
    before = header(path, columns)
    if before and before != columns:
        write(path, columns, read(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if not before:
            writer.writeheader()
        writer.writerows(records)


def write(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write a whole table, by way of a temporary file, so that an interruption loses no row."""
    path = path.resolve()  # what a link leads to is replaced, not the link
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
