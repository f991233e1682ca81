"""Rate and distortion of the codecs: bits per value against how much of a vector is lost.

    python -m pycomm.bench.distortion --csv bench/results/distortion-cpu.csv

codes two kinds of values: 2^20 normally distributed ones, and the gradients of the demo's model
(training/train.py) after 100 steps, each matrix separately, without the vectors. `bits` are bits of
the code per value, `error` is the relative squared error |x - decode(encode(x))|^2 / |x|^2. Nothing
is timed. Bits and errors do not depend on the machine, except for the last bits of the gradients.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from pycomm.bench.training.corpora import standard_library
from pycomm.bench.training.train import (
    Config,
    Transformer,
    batches,
    loss_of,
    schedule,
)
from pycomm.codecs import codec as parse_codec

NORMAL, GRADIENTS = "normal", "gradients"
VALUES = 1 << 20
STEPS = 100
FAMILIES: dict[str, Sequence[str]] = {
    "quant": [f"int{bits}" for bits in range(2, 9)],
    "eden": [f"eden:bits={bits}" for bits in ("0.5", 1, "1.5", 2, "2.5", 3, "3.5", 4, 5, 6, 7, 8)],
    "mx": ["mxfp4", "nvfp4", "mxfp6", "mxfp8"],
    "cast": ["fp8", "bf16", "fp16"],
    "sign": ["sign"],
    "topk": [f"topk:{density}" for density in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)],
}
LADDERS = ("quant", "eden", "topk")
"""Families whose codecs differ in a single number, so that a line can connect them."""


def gradients(steps: int = STEPS) -> list[torch.Tensor]:
    """Return the float32 gradients of the demo model's matrices after `steps` steps."""
    config = Config()
    torch.manual_seed(config.seed)
    model = Transformer(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas=(config.beta1, 0.95)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, config))
    data = batches(standard_library()[0], config, 0, 1)
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss_of(model, next(data)).backward()
        if step < steps:
            optimizer.step()
            scheduler.step()
    return [p.grad.flatten() for p in model.parameters() if p.grad is not None and p.ndim > 1]


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
            yield {
                "values": values,
                "count": count,
                "family": family,
                "codec": parse_codec(text).spec(),
                "bits": bits,
                "error": error,
            }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.distortion", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--csv", type=Path, help="append all rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.distortion", *argv]))
    torch.set_num_threads(1)  # fixes the order of sums, so that every run has the same gradients
    normal = torch.randn(VALUES, generator=torch.Generator().manual_seed(0))
    records = []
    print(f"{'values':<10} {'codec':<45} {'bits':>6} {'error':>9}")
    for values, vectors in ((NORMAL, [normal]), (GRADIENTS, gradients())):
        for row in rows(values, vectors):
            print(f"{values:<10} {row['codec']:<45} {row['bits']:>6.3f} {row['error']:>9.2e}")
            records.append(row | vars(origin))
    if options.csv:
        tables.append(options.csv, records)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
