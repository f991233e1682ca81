"""What CodedAdamW asks of a device in a step, on the stand-in: these numbers may only fall."""

from __future__ import annotations

from collections import Counter

import pytest

from pycomm.bench.step import stand_in
from pycomm.bench.step.stand_in import record
from pycomm.bench.training.train import MODELS

pytestmark = pytest.mark.timeout(300)  # the recorder takes 10 seconds of a free core
# Launches for each matrix, in the hooks and in the step, where kernels for all of a bucket are to
# be, and how often the host waits for the device in the step.
TODAY = {"hooks": 70, "step": 50, "waits": 1}


def test_what_coded_momentum_asks_for_only_falls():
    (found,) = record(MODELS["demo"], [{"codec": "coded sign"}])
    kinds = [kind for kind, _, _ in found.notes]
    begin = kinds.index(stand_in.STEP)
    hooks, step = Counter(kinds[:begin]), Counter(kinds[begin:])
    matrices = sum(len(shape) > 1 for shape in stand_in.shapes(MODELS["demo"]))
    asked = {
        "hooks": hooks[stand_in.WORK] / matrices,
        "step": step[stand_in.WORK] / matrices,
        "waits": step[stand_in.WAIT_STREAM] + step[stand_in.WAIT_EVENT],
    }
    assert all(asked[name] <= most for name, most in TODAY.items()), asked
