"""`python -m pycomm.bench codecs`: a row per codec and call, beside memcpy's rate."""

from __future__ import annotations

import os

import pytest

from pycomm.bench.common.harness import Row, read_rows
from pycomm.bench.ops import codecs
from pycomm.codecs import CODECS


@pytest.fixture(autouse=True)
def _blocks_are_short(monkeypatch):
    monkeypatch.setattr(codecs, "SECONDS", 0.002)


def test_rows(tmp_path):
    out = tmp_path / "out.csv"
    options = ["-b", "4K", "-e", "4K", "--codec", "int8,int4:block=64", "--csv", str(out)]
    assert codecs.main(options) == 0
    rows = read_rows(out, Row)
    specs = ["quant:bits=8,block=256,rounding=nearest", "quant:bits=4,block=64,rounding=nearest"]
    ops = ["encode", "encode+residual", "decode", "decode_add"]
    assert [(row.codec, row.op) for row in rows] == [(s, o) for s in specs for o in ops]
    for row in rows:
        assert row.algbw == 4096 / row.time_p50 / 1e3
        assert row.of_copy == row.algbw / row.copybw
    assert rows[0].ratio == 4096 / (1024 + 4 * 4)


def test_every_codec_is_measured_by_default():
    chosen = codecs.specs([])
    assert len(set(chosen)) == len(chosen)
    assert {spec.partition(":")[0] for spec in chosen} == set(CODECS)


def test_who_calls_it_is_not_left_on_one_core():
    cores = os.sched_getaffinity(0)
    assert codecs.main(["-b", "4K", "-e", "4K", "--codec", "topk:0.01"]) == 0
    assert os.sched_getaffinity(0) == cores
