"""The recent operations of this process, in the schema of torch's flight recorder.

Every group keeps a record of its last operations (2,048), without a lock or an
allocation. :func:`dump` writes them; with ``PYCOMM_TRACE=folder`` set, every rank does so when a
group fails. ``torchfrtrace folder`` then names the rank that is missing or called something else.
See ``docs/trace.md``.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pycomm import _C
from pycomm.errors import Error
from pycomm.folders import private

__all__ = ["collect", "dump"]

SPENT = ("waited_ns", "coded_ns")  # by a completed collective; pycomm.monitor sums it up

_written: set[str] = set()
_writing = threading.Lock()

Trace = dict[str, Any]


def collect(group: Any = None) -> dict[int, dict[str, Any]]:
    """Return the recent operations in the flight recorder's format, by global rank.

    Args:
        group: a :class:`pycomm.Communicator`, or the backend of a process group; None: all groups
            of this process. Ranks that are threads of one process are all in the result, otherwise
            it has one entry.

    Any thread may call this at any time, also while an operation hangs.
    """
    traces = _C.traces() if group is None else [group.trace()]
    by_rank: dict[int, list[Trace]] = {}
    for trace in traces:
        by_rank.setdefault(trace["global_ranks"][trace["rank"]], []).append(trace)
    return {rank: _recording(traces) for rank, traces in sorted(by_rank.items())}


def dump(path: str | os.PathLike[str] | None = None, *, group: Any = None) -> list[Path]:
    """Write the recent operations of this process to files.

    Args:
        path: a folder for ``rank_<r>.json`` and ``trace_rank_<r>``, which is the same in the
            pickled form that ``torchfrtrace`` reads; None: the one that PYCOMM_TRACE names. It is
            made if needed, for this user alone; one that is there must belong to this user or
            root, and be writable by nobody else.
        group: see :func:`collect`.

    Returns:
        The JSON files, one for each rank in this process.

    Raises:
        Error: no path is given or set.
        PermissionError: the folder is a link, another user's, or writable by others.
        OSError: the files cannot be written.

    Example:
        >>> import pycomm.trace
        >>> pycomm.trace.dump("traces")  # doctest: +SKIP
        [PosixPath('traces/rank_0.json')]
    """
    given = path or _C.env()["trace"]
    if not given:
        raise Error("trace.dump needs a path, or PYCOMM_TRACE=folder in the environment")
    target = Path(given)
    private(target)  # torch's reader unpickles what is in it
    files = []
    for rank, recording in collect(group).items():
        # The analyzer needs both ends, so receives without a known sender are left out.
        known = [e for e in recording["entries"] if not e["profiling_name"].endswith(":recv")]
        _write(target / f"trace_rank_{rank}", pickle.dumps({**recording, "entries": known}))
        files.append(target / f"rank_{rank}.json")
        _write(files[-1], json.dumps(recording, indent=1).encode())
    return files


def note_failure(text: str) -> str:
    """Write the traces once for this error; the bindings call this when PYCOMM_TRACE is set.

    Args:
        text: message of the error.

    Returns:
        The text with the location of the trace.
    """
    folder = _C.env()["trace"]
    with _writing:
        try:
            if text not in _written:
                dump(folder)
                _written.add(text)
        except OSError as error:
            return f"{text}\n  no trace: {error}"
    return f"{text}\n  trace: {folder}"


def _write(path: Path, content: bytes) -> None:
    """Write a file for this user alone; a reader never sees a part of it."""
    scratch = path.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(scratch, flags, 0o600), "wb") as file:
            file.write(content)
        scratch.replace(path)
    except OSError:  # a full disk
        scratch.unlink(missing_ok=True)
        raise


def _recording(traces: Iterable[Trace]) -> dict[str, Any]:
    groups: dict[str, dict[str, str]] = {}
    status: dict[str, dict[str, int]] = {}
    entries: list[dict[str, Any]] = []
    errors = {}
    namesakes: Counter[str] = Counter()
    for number, trace in enumerate(traces):
        name, ranks = trace["group"], trace["global_ranks"]
        namesakes[name] += 1
        if namesakes[name] > 1:  # a group of this name was made again while the older one lives
            name = f"{name}/{namesakes[name]}"
        description = trace["description"] or "undefined"
        groups[name] = {"name": name, "desc": description, "ranks": str(ranks)}
        if trace["error"]:
            errors[name] = trace["error"]
        collectives = [r for r in trace["records"] if r["op"] not in ("send", "recv")]
        started = max((r["seq"] for r in collectives), default=0)
        waiting = [r["id"] for r in collectives if r["state"] == "scheduled"]
        # The numbers that these calls get if nothing comes before them.
        expected = dict(zip(waiting, itertools.count(started + 1), strict=False))
        status[str(number)] = {
            "last_enqueued_collective": started + len(waiting),
            "last_started_collective": started,
            "last_completed_collective": max(
                (r["seq"] for r in collectives if r["state"] == "completed"), default=0
            ),
        }
        streams: Counter[str] = Counter()
        for record in trace["records"]:
            entry = _entry(record, len(ranks))
            entry |= {"pg_id": number, "process_group": (name, description)}
            entry["collective_seq_id"] = record["seq"] or expected.get(record["id"], 0)
            if record["op"] in ("send", "recv") and record["root"] >= 0:
                # Each direction of a stream gets its own group: the analyzer expects every rank
                # of an entry's group to take part in it.
                ends = trace["rank"], record["root"]
                source, target = ends if record["op"] == "send" else ends[::-1]
                stream = f"{name} {source}->{target}"
                pair = sorted((ranks[source], ranks[target]))
                groups[stream] = {"name": stream, "desc": "point to point", "ranks": str(pair)}
                entry["process_group"] = (stream, "point to point")
                streams[stream] += 1
                entry["collective_seq_id"] = entry["p2p_seq_id"] = streams[stream]
                first, second = pair.index(ranks[source]), pair.index(ranks[target])
                arrow = f"{first}->{second}" if record["op"] == "send" else f"{second}<-{first}"
                entry["profiling_name"] += " " + arrow
            entries.append(entry)
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    result = {
        "version": "2.10",  # of the flight recorder's schema
        "comm_lib_version": "pycomm",
        "pg_config": groups,
        "pg_status": status,
        "entries": entries,
    }
    return {**result, "errors": errors} if errors else result


def _entry(record: dict[str, Any], size: int) -> dict[str, Any]:
    op, numel, dtype = record["op"], record["numel"], record["dtype"]
    state = record["state"]
    uneven = record["label"].startswith("parts of ")
    peers = op in ("send", "recv")
    given = taken = numel
    if op == "all_gather" and not uneven:
        taken = size * numel
    elif op == "reduce_scatter" and not uneven:
        given = size * numel
    elif op == "all_to_all" and record["started_ns"]:
        given, taken = record["sent"], record["received"]
    started, ended = record["started_ns"], record["ended_ns"]
    return {
        "frames": [],
        "p2p_seq_id": 0,
        "op_id": record["id"],
        # torch's analyzer accepts the names of a few backends only; "pycomm" is not one of them.
        "profiling_name": f"gloo:{op}{'_v' if uneven and op != 'all_to_all' else ''}",
        "time_created_ns": record["issued_ns"],
        "input_sizes": [[given]] if op != "recv" else [],
        "input_dtypes": [dtype] if op != "recv" else [],
        "output_sizes": [[taken]] if op != "send" else [],
        "output_dtypes": [dtype] if op != "send" else [],
        "state": "started" if state == "failed" else state,  # it is not completed
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": ended if state == "completed" else None,
        **({"duration_ms": (ended - started) / 1e6} if state == "completed" else {}),
        "retired": state in ("completed", "failed"),
        "timeout_ms": 0,
        "is_p2p": peers,
        # Fields that torch's reader does not know.
        "pycomm": {
            "state": state,
            "algo": record["algo"],
            "codec": "" if uneven else record["label"],
            "redop": record["redop"] if op in ("all_reduce", "reduce_scatter", "reduce") else "",
            "root": -1 if peers else record["root"],
            **({} if peers or state != "completed" else {name: record[name] for name in SPENT}),
            **({"peer": record["root"], "tag": record["tag"]} if peers else {}),
        },
    }
