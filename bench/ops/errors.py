"""Rate and distortion of the codecs: bits per value against how much of a vector is lost.

    python -m pycomm.bench codecs --errors --csv bench/results/distortion-cpu.csv

codes two kinds of values: 2^20 normally distributed ones, and the gradients of the demo's model
(training/train.py) after 100 steps, each matrix separately, without the vectors. `bits` are bits of
the code per value, `error` is the relative squared error |x - decode(encode(x))|^2 / |x|^2. Nothing
is timed. Bits and errors do not depend on the machine, except for the last bits of the gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pycomm.bench.common.report import Column, Report
from pycomm.bench.training.train import alone
from pycomm.codecs import codec as parse_codec

NORMAL, GRADIENTS = "normal", "gradients"
VALUES = 1 << 20
STEPS = 100
FAMILIES: dict[str, Sequence[str]] = {
    "quant": [f"int{bits}" for bits in range(2, 9)],
    "eden": [f"eden:bits={bits}" for bits in (1, 2, 3, 4)],
    "mx": ["mxfp4", "nvfp4", "mxfp6", "mxfp8"],
    "cast": ["fp8", "bf16", "fp16"],
    "sign": ["sign"],
    "topk": [f"topk:{density}" for density in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)],
}
LADDERS = ("quant", "eden", "topk")
"""Families whose codecs differ in a single number, so that a line can connect them."""


def measure(text: str, vectors: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return bits per value and relative squared error of a codec."""
    codec = parse_codec(text)
    size = wrong = total = 0.0
    for vector in vectors:
        payload = codec.encode(vector)
        decoded = codec.decode(payload, vector.numel())
        size += payload.numel()
        wrong += float((vector.double() - decoded.double()).square().sum())
        total += float(vector.double().square().sum())
    return 8 * size / sum(vector.numel() for vector in vectors), wrong / total


def rows(values: str, vectors: Sequence[torch.Tensor]) -> Iterator[dict[str, Any]]:
    count = sum(vector.numel() for vector in vectors)
    for family, texts in FAMILIES.items():
        for text in texts:
            bits, error = measure(text, vectors)
            spec = parse_codec(text).spec()
            row = {"values": values, "count": count, "family": family, "codec": spec}
            yield row | {"bits": bits, "error": error}


COLUMNS = (
    Column("values", -10),
    Column("codec", -45),
    Column("bits", 6, ".3f"),
    Column("error", 9, ".2e"),
)


def run(options: argparse.Namespace) -> int:
    """Measure all codecs."""
    torch.set_num_threads(1)  # fixes the order of sums, so that every run has the same gradients
    normal = torch.randn(VALUES, generator=torch.Generator().manual_seed(0))
    gradients = [g.flatten() for g in alone(STEPS) if g.ndim > 1]
    report = Report(COLUMNS, options)
    report.header()
    for values, vectors in ((NORMAL, [normal]), (GRADIENTS, gradients)):
        for row in rows(values, vectors):
            report.add(row)
    return 0
