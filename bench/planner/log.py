"""The log that validate_plan.py's ranks write: one line of JSON per measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(log: str, **record: Any) -> None:
    with Path(log).open("a") as file:
        print(json.dumps(record), file=file, flush=True)
