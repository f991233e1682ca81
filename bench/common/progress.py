"""Progress of a measurement on standard error: a bar of rich, or plain lines without it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EVERY = 0.5  # seconds between two reads of a log


@contextmanager
def following(what: str, log: Path, total: int) -> Iterator[None]:
    """Show how many lines other processes have written to a log.

    Args:
        what: the runs, in a few words.
        log: the file, which need not exist yet.
        total: the expected number of lines.
    """
    if not sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    ended = threading.Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def look() -> None:
            while not ended.wait(_EVERY):
                bar.update(task, completed=lines(log))

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def lines(log: Path) -> int:
    """Return how many whole lines a file has; 0 if it does not exist."""
    try:
        return log.read_bytes().count(b"\n")
    except OSError:
        return 0
