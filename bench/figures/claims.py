"""What docs claim: claims.csv has the table and the command of each claim.

`quick` has the commands of `make bench`, which together take half an hour; a claim without any
takes too long for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pycomm.bench.common import tables

CLAIMS = tables.read(Path(__file__).with_suffix(".csv"))


def commands() -> Iterator[tuple[str, str]]:
    """Yield the tables and commands of `make bench`."""
    for claim in CLAIMS:
        for words in filter(None, claim["quick"].split("; ")):
            yield claim["table"], words
