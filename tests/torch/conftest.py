from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks that are torch processes; see torch_pool.py."""
    pool = Pool()
    yield pool
    pool.stop()
