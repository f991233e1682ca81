from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torch.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks that are torch processes; see pool.py."""
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder in which torch finds pycomm's entry point, as after an installation."""
    info = tmp_path / "entry-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nentry = pycomm._autoload:register\n")
    return tmp_path


@pytest.fixture(scope="module")
def fakes() -> Iterator[Pool]:
    """Start ranks with the simulated device, apart from others: it cannot be unloaded."""
    from tests.codecs.cuda import emulated
    from tests.torch.device import fake_device

    fake_device.built()
    emulated.all_kernels()  # compiled here, not within the deadline of a rank's answer
    pool = Pool()
    yield pool
    pool.stop()
