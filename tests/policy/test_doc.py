"""The examples of docs/policy.md do what it says."""

from __future__ import annotations

import doctest
from pathlib import Path

from pycomm import monitor

PAGE = Path(__file__).parents[2] / "docs" / "policy.md"


def test_examples(monkeypatch):
    monkeypatch.setattr(monitor, "_watched", {})  # other tests may have left something
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 8
    assert result.failed == 0
