from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.codecs.cuda import emulated
from tests.torch.device import fake_device
from tests.torch.pool import Pool


@pytest.fixture(scope="module")
def fakes() -> Iterator[Pool]:
    """Start separate ranks, since a device cannot be unloaded."""
    fake_device.built()
    emulated.all_kernels()  # compiled here, not within the deadline of a rank's answer
    pool = Pool()
    yield pool
    pool.stop()
