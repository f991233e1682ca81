"""The examples of docs/policy.md and of docstrings do what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from pycomm import monitor
from pycomm.policy import rules
from pycomm.straggler import show

PAGE = Path(__file__).parents[2] / "docs" / "policy.md"


@pytest.mark.parametrize("module", [rules, monitor], ids=lambda m: m.__name__)
def test_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_examples(monkeypatch):
    # Other tests may have left models and groups in this process.
    monkeypatch.setattr(monitor, "_watched", {})
    monkeypatch.setattr(show, "groups", list)
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 8
    assert result.failed == 0


def test_the_codecs_of_the_page_on_migrating_exist():
    text = (PAGE.parent / "migrating.md").read_text()
    text, _, earlier = text.partition("## From earlier versions of pycomm")
    # Of its rows, "was | now", the first cell names codecs that are gone.
    text += "\n".join(f"| {row.split(' | ', 1)[1]}" for row in earlier.splitlines() if " | " in row)
    named = r'(?:codec=|codec\(|model, |weights=)"([^"]+)"|\| `"([^"`]+)"`'
    found = {a or b for a, b in re.findall(named, text)}
    assert len(found) > 12
    for codec in sorted(found - {"auto"}):
        rules.Policy.of(codec)
