"""Former names of public functions and arguments work for one release, and warn the caller."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.policy import Policy


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(8, 8))


def warned(act: Callable[[], Any], *names: str) -> Any:
    """Return the result of a call that issues one DeprecationWarning, at its line in this file."""
    with pytest.warns(DeprecationWarning, match="is deprecated") as caught:
        result = act()
    (warning,) = caught
    assert warning.filename == __file__
    assert all(name in str(warning.message) for name in names), str(warning.message)
    return result


def check_states(rank: int, size: int) -> None:
    former = warned(lambda: pycomm.compress(wrapped(), spec="int4"), "spec=", "codec=")
    module = sys.modules["pycomm.compress"]
    through_module = warned(lambda: module(wrapped(), spec="int4"), "spec=", "codec=")
    present = pycomm.compress(wrapped(), codec="int4")
    assert former.plan.policy == through_module.plan.policy == present.plan.policy
    warned(lambda: present.take_over(former), "take_over", "adopt_state")
    for both in (
        lambda: pycomm.compress(wrapped(), "int4", spec="int4"),
        lambda: pycomm.compress(wrapped(), codec="int4", spec="int8"),
    ):
        with pytest.raises(TypeError, match="codec= and spec= were both given: use codec= alone"):
            both()


def test_compress_and_its_state_take_former_names(pool):
    pool.run(check_states, ranks=1, timeout=60, deadline=120)


def test_a_policy_takes_the_former_name_of_its_codec():
    assert warned(lambda: Policy.of(spec="int4 warmup=5"), "spec=") == Policy.of("int4 warmup=5")
    with pytest.raises(TypeError, match="both given"):
        Policy.of("int4", spec="int4")
