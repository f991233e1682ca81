"""Links between far nodes: their texts, losses and slower directions."""

from __future__ import annotations

import pytest

from pycomm.plan import Cluster, Link
from pycomm.plan.algorithms import Size, algorithms, all_reduce
from pycomm.plan.codecs import CODINGS, NONE
from pycomm.plan.sim import simulate

# ------------------------------------------------------------------ far links


def test_a_far_link_is_written_with_round_trip_and_loss():
    link = Link.parse("20mbit/50mbit,60ms,0.1%")
    assert link == Link.parse("20mbit/50mbit, 0.1%, 60ms")
    assert link.rate == pytest.approx(0.999 * 0.95 * 20e6 / 8)
    assert link.receive == pytest.approx(0.999 * 0.95 * 50e6 / 8)
    assert link.slower == link.rate
    assert (link.latency, link.loss, link.far) == (0.03, 0.001, True)
    assert Link.parse("1gbit", 0.02, loss=0.01) == Link.parse("1gbit,40ms,1%")
    assert Link.parse("10gbe") == Link.of("10gbe")
    assert Link.parse("3GB/s") == Link.of("3GB/s")
    assert not Link.parse("10gbe").far


@pytest.mark.parametrize("text", ["1gbit,40ms,200%", "1gbit,100%", "1gbit,far", "1gbit/", "/1gbit"])
def test_a_far_link_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match=r"cannot read|want"):
        Link.parse(text)


def test_a_loss_slows_down_what_is_not_bbr():
    """Mathis et al.: 1.22 packets / sqrt(loss) in a round trip, for each of two streams."""
    calm, lossy = Link.parse("1gbit,60ms"), Link.parse("1gbit,60ms,0.1%", congestion="cubic")
    assert lossy.rate == pytest.approx(2 * 1448 * (1.5 / 0.001) ** 0.5 / 0.06)
    assert Link.parse("1gbit,60ms,0.1%").rate == pytest.approx(0.999 * calm.rate)
    # Where the link is slower than that, it decides.
    assert Link.parse("5mbit,60ms,0.1%", congestion="cubic").slower < lossy.slower


def test_a_round_takes_the_way_and_sometimes_a_repetition():
    size = Size(2, 8.0)
    cost = {
        loss: all_reduce(Cluster(2, Link.parse(f"200mbit,60ms,{loss}")), NONE, "one_shot", size)
        for loss in ("0%", "1%")
    }
    assert cost["0%"].seconds == pytest.approx(0.03, rel=0.01)
    assert cost["1%"].seconds - cost["0%"].seconds == pytest.approx(0.01 * 0.06, rel=0.1)


@pytest.mark.parametrize("link", ["20mbit/50mbit,60ms", "50mbit/20mbit,60ms"])
def test_the_slower_direction_decides(link):
    cluster = Cluster(4, Link.parse(link))
    size = Size(1 << 22, float(1 << 24))
    seconds = all_reduce(cluster, NONE, "two_shot", size).seconds
    assert seconds == pytest.approx(0.06 + 1.5 * 2**24 / cluster.inter.slower, rel=0.02)
    events = simulate.all_reduce(cluster, NONE, "two_shot", size)
    assert events == pytest.approx(seconds, rel=0.05)


def test_between_far_ranks_a_codec_without_feedback_takes_one_way():
    """Two ranks send as many bytes; of more only little is sent in one way."""
    link, near = Link.parse("200mbit,200ms"), Link.parse("200mbit")
    fed, unfed = CODINGS["int8"], CODINGS["eden:bits=2"]
    assert algorithms(Cluster(2, link), fed, every=False) == ("two_shot",)
    assert algorithms(Cluster(2, near), unfed, every=False) == ("two_shot",)
    assert algorithms(Cluster(2, link), unfed, every=False) == ("one_shot", "two_shot")
    size = Size.of(1 << 22, unfed)
    one, two = (
        [predict(Cluster(2, link), unfed, way, size) for way in ("one_shot", "two_shot")]
        for predict in (lambda *case: all_reduce(*case).seconds, simulate.all_reduce)
    )
    assert one == pytest.approx(two, rel=0.1), "formulas and events agree"
    assert one[1] - one[0] == pytest.approx(0.1, rel=0.2)
    cluster = Cluster(8, link)
    for values, faster in ((1 << 10, "one_shot"), (1 << 24, "two_shot")):
        size = Size.of(values, unfed)
        costs = {way: all_reduce(cluster, unfed, way, size) for way in ("one_shot", "two_shot")}
        assert min(costs, key=lambda way: costs[way].seconds) == faster
