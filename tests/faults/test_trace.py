"""Traces of recent operations, and their analysis by torch's own analyzer."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import pycomm.trace
from pycomm import _C
from pycomm.errors import Error
from tests.collectives.ways import WAYS
from tests.extent import each_value
from tests.ranks import attempt, run


def ones(numel, dtype="float32"):
    return np.ones(numel, dtype)


def everything(c):
    """Call each operation once, with names that torch's analyzer knows."""
    n = c.size
    c.barrier()
    c.all_reduce(ones(100))
    c.all_gather(ones(5), ones(5 * n))
    c.reduce_scatter(ones(5 * n), ones(5))
    c.broadcast(ones(7), 1)
    c.reduce(ones(3), ones(3), 0)
    c.all_to_all(ones(2 * n), ones(2 * n))
    c.gather(ones(2), ones(2 * n) if c.rank == 0 else None)
    c.scatter(ones(2 * n) if c.rank == 0 else None, ones(2))
    c.all_reduce_coded(ones(5000), "quant:bits=4")
    if c.rank == 0:
        c.send(ones(4), 1, tag=9).wait()
    if c.rank == 1:
        c.recv(ones(4), tag=9).wait()


@pytest.mark.parametrize("way", ["window", "direct", "tcp"])
def test_an_entry_tells_how_long_a_rank_waited(way):
    def job(c):
        c.barrier()
        if c.rank == 2:
            time.sleep(0.1)
        c.all_reduce(ones(100))
        return pycomm.trace.collect(c)[c.rank]["entries"][1]

    *others, late = run(3, job, **WAYS[way])
    for entry in others:
        assert 5e7 < entry["pycomm"]["waited_ns"] <= entry["duration_ms"] * 1e6
    assert late["pycomm"]["waited_ns"] < 5e7


@pytest.mark.parametrize("way", ["window", "tcp"])
def test_an_entry_tells_what_codecs_took(way):
    def job(c):
        c.all_reduce(ones(100_000))
        c.all_reduce_coded(ones(100_000), "quant:bits=4")
        return [e["pycomm"]["coded_ns"] for e in pycomm.trace.collect(c)[c.rank]["entries"]]

    for exact, coded in run(2, job, **WAYS[way]):
        assert exact == 0
        assert coded > 0


@pytest.mark.parametrize("way", ["window", "direct", "ring", "tcp"])
def test_an_entry_tells_what_ran_and_when(way):
    def job(c):
        start = time.time_ns()
        everything(c)
        return start, time.time_ns(), pycomm.trace.collect(c)[c.rank]

    for rank, (start, end, recording) in enumerate(run(2, job, **WAYS[way])):
        entries = recording["entries"]
        names = [e["profiling_name"].removeprefix("gloo:") for e in entries]
        assert names == [
            "barrier",
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "broadcast",
            "reduce",
            "all_to_all",
            "gather",
            "scatter",
            "all_reduce",
            ("send 0->1", "recv 1<-0")[rank],
        ]
        assert [e["collective_seq_id"] for e in entries] == [*range(1, 11), 1]
        assert [e["record_id"] for e in entries] == list(range(11))
        sizes = [(e["input_sizes"], e["output_sizes"]) for e in entries]
        assert sizes[2:4] == [([[5]], [[10]]), ([[10]], [[5]])]
        assert sizes[6] == ([[4]], [[4]])
        assert sizes[10] == (([[16]], []), ([], [[16]]))[rank]
        assert entries[4]["pycomm"]["root"] == 1
        assert entries[9]["pycomm"]["codec"].startswith("quant:bits=4")
        assert entries[10]["pycomm"]["tag"] == 9
        assert (entries[1]["pycomm"]["algo"] == "window") == (way == "window")
        for entry in entries:
            assert entry["state"] == entry["pycomm"]["state"] == "completed"
            times = [
                entry["time_created_ns"],
                entry["time_discovered_started_ns"],
                entry["time_discovered_completed_ns"],
            ]
            assert times == sorted(times)
            # The two clocks are compared once per dump.
            assert start - 100_000 <= times[0]
            assert times[2] <= end + 100_000
        assert recording["pg_status"]["0"] == {
            "last_enqueued_collective": 10,
            "last_started_collective": 10,
            "last_completed_collective": 10,
        }


@pytest.mark.parametrize("calls", [0, 2047, 2048, 5000])
def test_the_last_operations_are_kept(calls):
    core = _C.Communicator(None, 0, 1, _C.CommunicatorOptions())
    for _ in range(calls):
        core.run("barrier", 0, 0, 0, _C.DType.uint8)
    numbers = [record["seq"] for record in core.trace()["records"]]
    assert numbers == list(range(1, calls + 1))[-2048:]


def test_it_may_be_read_while_operations_run():
    core = _C.Communicator(None, 0, 1, _C.CommunicatorOptions())
    stop = threading.Event()

    def work():
        while not stop.is_set():
            for _ in range(1000):
                core.run("barrier", 0, 0, 0, _C.DType.uint8)

    worker = threading.Thread(target=work)
    worker.start()
    reads = []
    while sum(map(len, reads)) < 200_000 and len(reads) < 5000:
        reads.append(core.trace()["records"])
    stop.set()
    worker.join()
    assert any(reads)
    for records in reads:
        ids = [record["id"] for record in records]
        assert ids == sorted(set(ids))
        assert all(record["id"] == record["seq"] for record in records)  # whole records only


class Analyzed(logging.Handler):
    """The messages of torchfrtrace about a folder."""

    def __init__(self, folder):
        super().__init__()
        self.lines = []
        from torch.distributed.flight_recorder import fr_trace

        logger = logging.getLogger("Flight Recorder")
        logger.addHandler(self)
        try:
            fr_trace.main([str(folder)])
        finally:
            logger.removeHandler(self)
            gc.enable()  # the analyzer disables it

    def emit(self, record):
        self.lines.append(record.getMessage())


@each_value
@pytest.mark.parametrize("way", ["window", "tcp"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", ["none", "differs", "missing"])
def test_torchs_analyzer_names_the_rank(tmp_path, way, ranks, fault):
    over = threading.Barrier(ranks)
    odd = ranks - 1

    def job(c):
        everything(c)
        c.timeout = 0.3
        try:
            if fault == "differs":
                c.all_reduce(ones(999 if c.rank == odd else 1000))
            elif fault == "missing" and c.rank != odd:
                c.all_reduce(ones(1000))
        finally:
            over.wait(10)
            pycomm.trace.dump(tmp_path, group=c)

    attempt(ranks, job, **WAYS[way])
    said = Analyzed(tmp_path).lines
    if fault == "none":
        assert said == []
        return
    assert said[3] == "collective: gloo:all_reduce"
    if fault == "differs":
        assert said[0] == "Collective sequence number: 11 has errors"
        # The analyzer takes the first file that it finds as the reference.
        culprits = next(line for line in said if "Culprit" in line)
        assert "SIZE_OR_SYNTAX_MISMATCH" in culprits
        assert "'[[1000]]'" in culprits
        assert "'[[999]]'" in culprits
    else:
        assert said[0] == "Not all ranks joining collective, sequence number: 11"
        assert said[4] == f"missing ranks: {{{odd}}}"


def fail():
    """Print the error of a rank whose peer never makes the second call."""
    over = threading.Barrier(2)

    def job(c):
        c.barrier()
        try:
            if c.rank == 0:
                c.all_reduce(np.ones(3))
        finally:
            over.wait(10)

    # A disk that is full (ulimit -f) has no room for shared memory either.
    print(attempt(2, job, timeout=0.2, transport="tcp")[0], end="")


def failing_run(*command, **variables):
    command = [*command, sys.executable, "-c", f"from {__name__} import fail; fail()"]
    env = {**os.environ, **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_a_failure_writes_the_trace_where_the_environment_says(tmp_path):
    plain = failing_run()
    folder = tmp_path / "traces"
    assert failing_run(PYCOMM_TRACE=str(folder)) == f"{plain}\n  trace: {folder}"
    assert sorted(f.name for f in folder.iterdir()) == [
        "rank_0.json",
        "rank_1.json",
        "trace_rank_0",
        "trace_rank_1",
    ]
    recording = json.loads((folder / "rank_0.json").read_text())
    assert recording["errors"]["default"] == plain
    assert [e["pycomm"]["state"] for e in recording["entries"]] == ["completed", "failed"]
    assert recording["version"] == "2.10"


def test_a_trace_is_for_its_user_alone(tmp_path):
    failing_run(PYCOMM_TRACE=str(tmp_path / "traces"))
    assert {f.stat().st_mode & 0o777 for f in (tmp_path / "traces").iterdir()} == {0o600}
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    text = failing_run(PYCOMM_TRACE=str(tmp_path / "open"))
    assert "no trace: " in text
    assert "can be written by other users" in text
    assert not list((tmp_path / "open").iterdir())


@pytest.mark.parametrize("why", ["no folder", "full disk"])
def test_a_trace_that_cannot_be_written_hides_no_error(tmp_path, why):
    place, command = tmp_path / "place", []
    if why == "full disk":
        place.mkdir()
        command = ["sh", "-c", 'ulimit -f 0; trap "" XFSZ; exec "$@"', "sh"]
    else:
        place.write_text("")
    text = failing_run(*command, PYCOMM_TRACE=str(place))
    assert why == "no folder" or not list(place.iterdir())
    assert text.startswith(
        "rank 0: all_reduce #2 (sum of 3 float64) did not end within the timeout of 200 ms\n"
    )
    assert "\n  no trace: " in text


def test_the_trace_of_a_group_has_one_rank(tmp_path, monkeypatch):
    def job(c):
        c.barrier()
        return pycomm.trace.dump(tmp_path / f"of {c.rank}", group=c)

    files = run(2, job)
    assert files == [[tmp_path / f"of {rank}/rank_{rank}.json"] for rank in range(2)]
    assert [len(json.loads(f[0].read_text())["entries"]) for f in files] == [1, 1]
    with pytest.raises(Error, match="PYCOMM_TRACE"):
        pycomm.trace.dump()
    monkeypatch.chdir(tmp_path / "of 0")
    assert run(1, lambda c: pycomm.trace.dump(".", group=c)) == [[Path("rank_0.json")]]
