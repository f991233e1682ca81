"""A sample of the random faults of `make soak`, and checks that the judge detects breaches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.collectives.ways import WAYS
from tests.extent import each_value, part
from tests.faults.injection import unequal
from tests.faults.injection.case import FAULTS, OPS, Call, draw
from tests.faults.injection.play import Played, breaches, play, survivors

SEED = 7


TRANSPORTS = ["shm", "tcp", "auto"]


@pytest.mark.parametrize(
    ("fault", "transport"),
    [(f, t) for place, f in enumerate(FAULTS) for t in part(TRANSPORTS, 3, place)],
)
def test_a_fault_is_told_by_name_and_leaves_nothing_behind(fault, transport):
    case = draw(SEED, 0, transports=[transport], faults=[fault], phases=["steady"])
    assert breaches(play(case)) == [], str(case)


def test_a_stopped_process_is_told_so():
    case = draw(SEED, 0, transports=["shm"], faults=["stop"], phases=["steady"])
    case = replace(case, calls=(Call("send_recv", 100),))  # all ranks wait for each other
    played = play(case)
    assert breaches(played) == []
    for rank in survivors(case):
        assert f"rank {case.victim} is stopped" in played.said[rank]["over"]["text"]


@each_value
@pytest.mark.parametrize("how", [0.0, 0.5], ids=["heap", "private"])
@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_goes_on_late_neither_succeeds_nor_writes(op, how):
    """It is stopped in a call until the other rank uses its memory for something else."""
    for number in range(20):
        case = draw(SEED, number, transports=["shm"], faults=["pause"], phases=["steady"])
        call = Call(op, 1 << 20, root=1)
        case = replace(case, ranks=2, victim=0, calls=(call,), async_op=False, how=how)
        played = play(case)
        assert breaches(played) == [], str(case)
        late, other = (played.word(rank, "over")["seq"] for rank in range(2))
        assert late <= other, "it has ended a call that the other rank has given up"
        if played.word(0, "over")["began"] < played.struck:
            return
    pytest.fail("the rank was never stopped in the middle of a call")


@pytest.mark.parametrize("phase", ["init", "split", "shutdown"])
def test_a_death_outside_of_the_steady_state(phase):
    case = draw(SEED, 1, transports=["shm", "tcp"], faults=["kill"], phases=[phase])
    assert case.phase == phase
    assert breaches(play(case)) == [], str(case)


def test_a_case_is_its_seed_and_number():
    ways = {"transports": ["shm", "tcp"]}
    assert draw(1, 5, **ways) == draw(1, 5, **ways)
    assert len({draw(1, number, **ways) for number in range(50)}) == 50


TRUE = "rank {} died: its process is gone\n  rank 0 waits: in {} #5 (10 float32)"


@pytest.mark.parametrize(
    ("facts", "breach"),
    [
        ({"error": None}, "not {'PeerLost'}"),
        ({"error": "Timeout"}, "not {'PeerLost'}"),
        ({"named": 9}, "does not name rank"),
        ({"text": "rank 7 died in all_reduce #5"}, "does not name rank"),
        ({"seq": 7}, "does not name"),
        ({"leaks": {"threads": 1}}, "leaves behind 1 threads"),
    ],
)
def test_the_judge_finds(facts, breach):
    case = draw(SEED, 0, transports=["shm"], faults=["kill"], phases=["steady"])
    other = (case.victim + 1) % case.ranks
    op = next(call.op for call in case.calls)
    over = {"error": "PeerLost", "named": case.victim, "op": "barrier", "seq": 5}
    over["text"] = TRUE.format(case.victim, op)
    said = {"over": over, "left": {}}
    assert breaches(Played(case, said={other: said})) == []
    said = {"over": over | facts, "left": facts.get("leaks", {})}
    found = breaches(Played(case, said={other: said}))
    assert len(found) == 1
    assert breach in found[0]


# ------------------------------------------------------------------------------ unequal arguments
# Unequal arguments of a call: cases drawn at random, some for each transport.


@pytest.mark.parametrize("way", WAYS)
def test_unequal_arguments_are_errors_on_every_rank(way):
    for number in range(30):
        case = unequal.draw(11, number, way)
        assert unequal.play(case) == [], str(case)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_calls_on_every_rank_are_right(way):
    for number in range(20):
        case = unequal.draw(12, number, way)
        assert unequal.play(replace(case, theirs=case.ours)) == [], str(case)


def test_cases_differ_in_everything_that_a_call_has():
    drawn = [unequal.draw(11, number) for number in range(2000)]
    assert {case.ours[0].op for case in drawn} == set(unequal.OPS)
    every = {what for op in unequal.OPS for what in unequal.ways_to_differ(op)}
    assert {case.what for case in drawn} == every
    assert all(case.ours != case.theirs for case in drawn)
