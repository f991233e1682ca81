"""The straggler monitor: the slowest rank and the cause, from ranks' statistics to the report."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict

import numpy as np
import pytest

from pycomm import monitor, straggler
from pycomm.env import env
from pycomm.errors import Error
from pycomm.straggler import (
    SAMPLE,
    MonitoredGroup,
    RankStats,
    StragglerMonitor,
    TimeShares,
    compare,
    rank_stats,
)
from pycomm.units import format_time
from tests.collectives.ways import WAYS
from tests.ranks import run

# ------------------------------------------------------- statistics of real operations


# Seconds: longer than a busy machine keeps a thread waiting for its core, time after time.
LATE = 0.1


def steps(c, late=0.0, count=12):
    """Run steps in which the last rank computes longer by `late` seconds."""
    x = np.ones(1000, np.float32)
    c.barrier()
    for _ in range(count):
        time.sleep(0.002 + (late if c.rank == c.size - 1 else 0))
        c.all_reduce(x)
    trace = c.core.trace()
    c.barrier()
    return trace


# ------------------------------------------------------------- statistics from traces


def trace_of(lengths, *, rank=0, ranks=(0, 1), group="all", op="all_reduce", begin=0):
    """Return a trace of operations that each take (compute, waited, coded, moving) nanoseconds."""
    records, now = [], begin
    for seq, (compute, waited, coded, moving) in enumerate(lengths, 1):
        started = now + compute
        now = started + waited + coded + moving
        records.append(
            {
                "op": op,
                "seq": seq,
                "state": "completed",
                "started_ns": started,
                "ended_ns": now,
                "waited_ns": waited,
                "coded_ns": coded,
            }
        )
    links = [(0, 0)] * len(ranks)
    return {
        "group": group,
        "rank": ranks.index(rank),
        "global_ranks": list(ranks),
        "records": records,
        "links": links,
    }


def test_an_account_says_where_the_time_went():
    us = 1000
    spent = rank_stats(trace_of([(0, 0, 0, us)] + [(4 * us, 3 * us, 2 * us, us)] * 3)).operations
    assert list(spent) == [2, 3, 4]  # the time before the first operation is unknown
    assert spent[3] == pytest.approx(TimeShares(4e-6, 0, 3e-6, 2e-6, 1e-6))
    stats = rank_stats(trace_of([(us, us, us, us)] * 3))
    assert RankStats.from_json(json.loads(json.dumps(asdict(stats)))) == stats


def test_time_in_other_groups_is_not_computing():
    us = 1000
    trace = trace_of([(0, 0, 0, us), (10 * us, 0, 0, us)])
    # From 3 to 8 us, in two operations that overlap; one of them began inside of this one.
    first = trace_of([(us // 2, 0, 0, 3 * us + us // 2)], group="other", begin=0)
    second = trace_of([(0, 0, 0, 5 * us)], group="third", begin=3 * us)
    spent = rank_stats(trace, [first, second]).operations[2]
    assert spent.elsewhere == pytest.approx(7e-6)
    assert spent.compute == pytest.approx(3e-6)


def test_operations_that_had_nothing_to_run_are_left_out():
    us = 1000
    trace = trace_of([(0, 0, 0, us), (4 * us, 3 * us, 2 * us, us)])
    other = trace_of([(0, 0, 0, us)], group="other")
    other["records"].append({**other["records"][0], "seq": 2, "started_ns": None})
    trace["records"].append({**trace["records"][0], "seq": 3, "started_ns": None})
    assert list(rank_stats(trace, [other]).operations) == [2]


def test_ranks_choose_the_same_operations():
    long, longer = (trace_of([(1000, 1000, 0, 1000)] * n) for n in (8 * SAMPLE, 8 * SAMPLE + 9))
    one, other = rank_stats(long).operations, rank_stats(longer).operations
    assert SAMPLE / 2 < len(one) < 2 * SAMPLE
    assert set(one) & set(other) >= set(one) - {max(one)} or set(other) < set(one)


def test_only_synchronizing_operations_are_compared():
    assert rank_stats(trace_of([(1000, 0, 0, 1000)] * 9, op="broadcast")).operations == {}


def test_what_a_link_has_carried_counts_from_the_last_time():
    trace = trace_of([(1, 1, 0, 1)] * 2)
    trace["links"] = [(0, 0), (9_000_000, 4_000_000)]
    assert rank_stats(trace).links == {1: 2_250_000.0}
    assert rank_stats(trace, before=[(0, 0), (4_000_000, 2_000_000)]).links == {1: 2_500_000.0}
    anew = [(0, 0), (10_000_000, 9_000_000)]  # a new connection, whose counters begin at zero
    assert rank_stats(trace, before=anew).links == {1: 2_250_000.0}


# ---------------------------------------------------------------- conclusions


def all_stats(*spent, rates=(), count=20):
    """Return ranks that spend these milliseconds per operation and send at these rates."""
    return [
        RankStats(
            rank,
            f"node{rank}",
            dict.fromkeys(range(count), TimeShares(*(ms / 1e3 for ms in each))),
            {p: r for p, r in enumerate(rates[rank]) if r} if rates else {},
        )
        for rank, each in enumerate(spent)
    ]


def finding(*args, **kwargs):
    health = compare(all_stats(*args, **kwargs))
    assert health is not None
    return health.finding


def test_equal_ranks_are_not_spoken_of():
    assert finding((90, 0, 8, 0, 2), (91, 0, 7, 0, 2), (89, 0, 9, 0, 2), (92, 0, 6, 0, 2)) is None


def test_a_rank_that_waits_for_another_group_is_not_blamed():
    assert finding((50, 0, 50, 0, 0), (50, 50, 0, 0, 0), (50, 0, 50, 0, 0)) is None


def test_one_long_pause_is_not_spoken_of():
    ranks = all_stats((90, 0, 8, 0, 2), (90, 0, 8, 0, 2), (90, 0, 8, 0, 2))
    ranks[0].operations[7] = TimeShares(60.0, 0, 0, 0, 0)  # it wrote a checkpoint
    for other in ranks[1:]:
        other.operations[7] = TimeShares(0.1, 0, 59.9, 0, 0)
    assert compare(ranks).finding is None


def test_a_draw_between_two_is_not_spoken_of():
    ranks = all_stats((90, 0, 0, 0, 0), (90, 0, 0, 0, 0))
    for seq in range(20):
        slow, fast = (0, 1) if seq % 2 else (1, 0)
        ranks[slow].operations[seq] = TimeShares(0.09, 0, 0.0, 0, 0)
        ranks[fast].operations[seq] = TimeShares(0.05, 0, 0.04, 0, 0)
    assert compare(ranks).finding is None


MB = 1e6
WAITING = ((12, 0, 85, 0, 3),) * 3


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param([(0, 24 * MB, 7 * MB), (24 * MB, 0, 7 * MB), (7 * MB, 7 * MB, 0)], id="both"),
        pytest.param([(0, 24 * MB, 7 * MB), (24 * MB, 0, 7 * MB), (20 * MB, 20 * MB, 0)], id="in"),
        pytest.param([(0, 24 * MB, 22 * MB), (24 * MB, 0, 20 * MB), (7 * MB, 7 * MB, 0)], id="out"),
    ],
)
def test_a_slow_link_is_named(rates):
    # All ranks wait equally; the rates are from namespaces, one with a quarter of the rate.
    found = finding(*WAITING, rates=rates)
    assert (found.rank, found.cause) == (2, "link")
    assert "the link of rank 2 (node2) carries 7 MB/s" in found.text


def test_links_that_are_alike_are_not_named():
    alike = [(0, 24 * MB, 22 * MB), (20 * MB, 0, 18 * MB), (21 * MB, 19 * MB, 0)]
    assert finding(*WAITING, rates=alike) is None
    slow = [(0, 24 * MB, 7 * MB), (24 * MB, 0, 7 * MB), (7 * MB, 7 * MB, 0)]
    assert finding(*[(88, 0, 10, 0, 2)] * 3, rates=slow) is None


# ---------------------------------------------------------------- exchange between ranks


@pytest.mark.parametrize("way", ["window", "ring", "tcp"])
def test_the_first_rank_names_the_last_which_computes_longer(way):
    keys, said = {}, []

    def job(c):
        steps(c, late=LATE)
        trace = c.core.trace()
        group = MonitoredGroup(trace["group"], c.rank, (0, 1, 2), keys.__setitem__, keys.get)
        ours = StragglerMonitor(86400, said.append)
        ours.join(group)
        try:
            ours.publish(7)
            c.barrier()
            ours.read(6)  # the other rank has published nothing
            assert ours.found == {}
            ours.read(7)
            c.barrier()
        finally:
            ours.close()
        return ours.found

    first, *others = run(3, job, group="together", **WAYS[way])
    assert others == [{}, {}]
    ((group, health),) = first.items()
    assert group == ("together", (0, 1, 2))
    assert (health.finding.rank, health.finding.cause) == (2, "compute")
    assert said == [health.finding.text]
    assert len(keys) == 3
    assert health.operations == 13  # with the last barrier
    assert health.skew_median > LATE / 2
    *quick, late = health.ranks
    assert late.last > 0.9
    for other in quick:
        assert other.shares.waited > 0.3
        assert other.shares.compute < late.shares.compute


def test_a_store_that_is_gone_ends_the_comparing():
    def gone(*_):
        raise RuntimeError("connection reset")

    ours = StragglerMonitor(86400, lambda line: None)
    ours._groups.append(MonitoredGroup("default", 0, (0, 1), gone, gone))
    ours.read(1)
    assert ours._groups == []


STATISTICS = {"number": 1, "rank": 0, "host": "", "operations": {}, "links": {}}
WRONG_TYPE = json.dumps({**STATISTICS, "operations": {1: ["x", 1, 1, 1]}})


@pytest.mark.parametrize("text", ["junk", "[]", '{"number": 1}', WRONG_TYPE, None])
def test_a_value_of_a_stranger_is_warned_of_once(text, caplog):
    """Otherwise it would end the thread, and say nothing."""

    def look(key):
        if text is None:
            raise Error("what the store has has a wrong proof of the secret")
        return text if key.endswith("1") else None

    ours = StragglerMonitor(86400, lambda line: None)
    ours._groups.append(MonitoredGroup("default", 0, (0, 1), lambda key, value: None, look))
    for _ in range(3):
        ours.read(1)
    (warned,) = [r.getMessage() for r in caplog.records]
    assert warned.startswith("slow ranks of the group 'default' cannot be told: what ")
    assert ours.found == {}


def test_the_thread_ends_after_the_last_group():
    def job(c):
        ours = StragglerMonitor(0.05, lambda line: None)
        ours.join(MonitoredGroup("ends", c.rank, (0, 1), lambda key, value: None, lambda key: None))
        return ours._thread

    for thread in run(2, job, group="ends"):  # a group name that no other test uses
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_group_that_is_made_again_is_monitored_once():
    ours = StragglerMonitor(86400, lambda line: None)
    first, second = (MonitoredGroup("again", 0, (0, 1), print, print) for _ in range(2))
    ours.join(first)
    ours.join(second)
    ours.close()
    assert [group is second for group in ours._groups] == [True]


def test_what_goes_on_is_said_every_60_comparisons():
    said, now = [], 0

    def look(key):
        assert ours.found or not now  # who asks meanwhile gets the comparison before
        stats = all_stats((90, 0, 8, 0, 2), (50, 0, 48, 0, 2))[int(key[-1])]
        return json.dumps({"number": now, **asdict(stats)})

    ours = StragglerMonitor(86400, lambda line: said.append(now))
    ours._groups.append(MonitoredGroup("default", 0, (2, 3), lambda *_: None, look))
    for now in range(200):
        ours.read(now)
    assert said == [0, 60, 120, 180]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 60.0), ("on", 60.0), ("off", None), ("1", 1.0), ("86400", 86400.0), ("0.5", "")],
)
def test_the_variable_says_how_often(monkeypatch, text, seconds):
    monkeypatch.setenv("PYCOMM_HEALTH", text)
    env.cache_clear()
    try:
        if seconds == "":
            with pytest.raises(ValueError, match="expected on, off, or 1 to 86400 seconds"):
                env()
        else:
            assert env().health == seconds
    finally:
        env.cache_clear()


# ---------------------------------------------------------------- reports


def test_the_report_names_the_slow_rank(monkeypatch):
    def job(c):
        steps(c, late=LATE)
        c.all_reduce_coded(np.ones(1000, np.float32), "quant:bits=4")
        c.barrier()
        if c.rank > 0:
            c.barrier()
            return None
        ours = StragglerMonitor(86400, lambda line: None)
        traces = [t for t in straggler._C.traces() if t["group"] == "shown"]
        health = compare([rank_stats(trace) for trace in traces])
        ours.found = {("shown", (0, 1)): health}
        monkeypatch.setattr(straggler, "_monitor", ours)
        result = monitor.text(), health
        c.barrier()
        return result

    text, health = run(2, job, group="shown")[0]
    assert "group shown: rank 0 of 2" in text
    middle_and_most = r"[\d.]+ .s at the median, [\d.]+ .s at p99"
    shares = r"\d+ % waiting for others, \d+ % in codecs"
    assert re.search(f"all_reduce: 13 operations, 52 kB, {middle_and_most}; of that {shares}", text)
    assert f"arrive within {format_time(health.skew_median)} at the median" in text
    assert health.finding.text in text
    assert "comes last to" in text
    assert health.finding.rank == 1
