"""Sites: hosts near each other, far from all others, reduce among themselves first."""

from __future__ import annotations

import pytest

from pycomm.errors import Error, WireMismatch
from tests.collectives.coded.test_nodes import MIXED, check, job
from tests.collectives.test_algorithms import all_collectives, check_all_collectives, float_sums
from tests.collectives.test_hierarchical import NODES, check_sums
from tests.collectives.ways import TINY, bits, floats
from tests.extent import part
from tests.ranks import attempt, run

# The site of each rank, and its node where some share memory.
SITES = {name: (sites, list(range(len(sites)))) for name, sites in NODES.items() if name != "one"}
SITES["hosts of two ranks"] = [0, 0, 0, 1, 1], [0, 0, 1, 2, 2]
SITES["a host among three"] = [0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 2, 3, 4, 5]
sites = pytest.mark.parametrize("name", SITES)


def options(name, **more):
    sites, nodes = SITES[name]
    return {"transport": "local", "sockets": 1, "nodes": nodes, "sites": sites, **more}


# Here and in the next test, sites take turns with the segments, the other way round there.
SEGMENTS = [("whole", {}), ("tiny", TINY)]


@pytest.mark.parametrize(
    ("name", "segments"),
    [
        pytest.param(name, more, id=f"{name}-{kind}")
        for place, name in enumerate(SITES)
        for kind, more in part(SEGMENTS, 2, place)
    ],
)
def test_every_collective_is_exact(name, segments):
    check_all_collectives(run(len(SITES[name][0]), all_collectives, **options(name, **segments)))


@sites
def test_float_sums_go_site_by_site_at_every_size(name):
    order, n = SITES[name][0], len(SITES[name][0])
    if name == "hosts of two ranks":
        order = [0, 0, 0, 1, 1]  # inside a site in rank order, whatever shares memory
    turns = part(SEGMENTS, 2, [*SITES].index(name) + 1)
    outcomes = [run(n, float_sums, **options(name, **more)) for _, more in turns]
    check_sums(order, outcomes)


@pytest.mark.parametrize("name", ["2+2", "mixed", "3+1", "2+1+2", "hosts of two ranks"])
def test_a_site_codes_its_sum_as_a_rank_would(name):
    check(run(len(SITES[name][0]), job(MIXED), **options(name)), SITES[name][0], MIXED)


def test_sites_with_unequal_links_keep_their_bits():
    def reduce(c):
        x = floats(c.rank, 30011)
        c.all_reduce(x)
        return bits(x), c.core.shares

    rates = ["20mbit", "20mbit", "100mbit", "100mbit", "100mbit", "100mbit"]
    six = {"transport": "tcp", "sites": [0, 0, 1, 1, 2, 2]}
    expected = run(6, reduce, **six)
    found = run(6, reduce, of_rank=lambda rank: {"rate": rates[rank]}, **six)
    assert [rank[0] for rank in found] == [rank[0] for rank in expected]
    assert {tuple(rank[1]) for rank in found} == {(0, 0, 32768, 65536)}


def test_describe_and_levels_tell_the_sites():
    for text, levels in run(4, lambda c: (c.describe(), c.core.levels), **options("mixed")):
        assert text.endswith("; 2 sites: 0,2 | 1,3")
        assert levels == [0, 1, 0, 1]
    for text, levels in run(3, lambda c: (c.describe(), c.core.levels), **options("flat")):
        assert "sites" not in text, "each host is a site of its own"
        assert levels == []
    assert run(4, lambda c: c.core.levels, **options("mixed", algo="flat")) == [[]] * 4


def test_wrong_sites_are_refused():
    with pytest.raises(Error, match="3 sites are declared for 2 ranks"):
        run(2, lambda c: None, transport="tcp", sites=[0, 0, 1])
    for error in attempt(2, lambda c: None, of_rank=lambda rank: {"sites": [0, rank]}):
        assert isinstance(error, WireMismatch)
        assert "sites=0,0" in str(error)
        assert "sites=0,1" in str(error)
