"""People see decisions once, whether or not their program has set up logging."""

from __future__ import annotations

import logging

from pycomm.policy.exchange import tell


def test_without_logging_it_goes_to_standard_error(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger("pycomm"), "hasHandlers", lambda: False)
    tell("int8 for all")
    captured = capsys.readouterr()
    assert captured.err == "pycomm: int8 for all\n"
    assert captured.out == ""


def test_with_logging_it_is_information(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="pycomm"):
        tell("int8 for 100 % of all")
    assert caplog.record_tuples == [("pycomm", logging.INFO, "int8 for 100 % of all")]
    assert capsys.readouterr().err == ""
