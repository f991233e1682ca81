"""Error of a whole compressed all-reduce, compared with a ring that codes at each hop.

    python -m pycomm.bench.reduced

trains the demo's model (training/train.py) with exact gradients of 8 ranks, and reduces those of
one step by `Communicator.all_reduce_coded` among 2, 4 and 8 ranks that are threads. `error` is
|result - mean|^2 / |mean|^2 over the whole gradient; `bits` are bits of payload per value,
including scales, headers and the parameters that travel exactly. `ratio` is the error divided by
that of `ring MXFP8`: a reduce-scatter and an all-gather in a ring whose partial sums travel in
MXFP8 (OCP MX v1.0: blocks of 32, scales by the floor rule, e4m3 rounded to nearest), for all
parameters. A policy uses energies that were measured `STALE` steps earlier. Biased codecs have
residuals, as by default, which are zero in the beginning. Nothing is timed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import threading
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
from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec
from pycomm.communicator import Communicator, Piece, Store
from pycomm.policy import Parameter, Policy
from pycomm.policy.codec_selection import select_codecs
from pycomm.policy.rules import EXACT
from pycomm.reduction.bucket import Piece as BucketPiece

RANKS = (2, 4, 8)
STEP, STALE = 150, 49
RING = "ring MXFP8"
TEXTS = (
    "int5",
    "int6",
    "eden:bits=5",
    "budget=5.15 of int2 to int8",
    "budget=5.15",
    "budget=5.25 of int2 to int8",
    "budget=5.25",
    "mxfp8",
    "int8",
)
INTEGERS = tuple(f"int{bits}" for bits in range(2, 9))


def gradients(steps: Sequence[int]) -> tuple[list[Parameter], dict[int, torch.Tensor]]:
    """Return the model's parameters, and by step the ranks' gradients, float32 [ranks, values]."""
    config, ranks = Config(), max(RANKS)
    torch.manual_seed(config.seed)
    model = Transformer(config)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas=(config.beta1, 0.95)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, config))
    text = standard_library()[0]
    data = [batches(text, config, rank, ranks) for rank in range(ranks)]
    found = {}
    for step in range(max(steps) + 1):
        rows = []
        for rank in range(ranks):
            optimizer.zero_grad()
            loss_of(model, next(data[rank])).backward()
            rows.append(torch.cat([p.grad.flatten() for _, p in named if p.grad is not None]))
        if step in steps:
            found[step] = torch.stack(rows)
        sizes = [p.numel() for _, p in named]
        mean = torch.stack(rows).mean(0)
        for (_, p), part in zip(named, torch.split(mean, sizes), strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()
        scheduler.step()
    return [Parameter(name, tuple(p.shape), p.dtype) for name, p in named], found


def codecs(text: str, parameters: Sequence[Parameter], before: torch.Tensor) -> list[Codec]:
    """Return a policy's codecs after it has measured gradients, float32 [ranks, values]."""
    if text.endswith(" of int2 to int8"):
        policy = Policy(budget=float(text.split()[0].partition("=")[2]), candidates=INTEGERS)
    else:
        policy = Policy.of(text)
    exact, pieces, at = parse_codec(EXACT), [], 0
    for p in parameters:
        pieces.append(BucketPiece(p.name, at, p.numel, exact, 0, None))
        at += p.numel
    heard: list[list[float]] = []

    def tell(own: Sequence[float]) -> list[list[float]]:
        heard.append(list(own))
        return heard

    found = {}
    for row in before:  # the last row's plan gets the numbers of all ranks
        chosen = select_codecs(policy)
        for p in parameters:
            if policy.rule(p) is not None:
                found[p.name] = exact
            elif chosen is None:
                found[p.name] = parse_codec(policy.codec).fit(p.shape)
            else:
                chosen.enter(p)
        if chosen is not None:
            chosen.step(0.0, tell, lambda _: 0)
            chosen.probe(row, pieces)
            chosen.step(0.0, tell, lambda _: 0)
            found |= {p.name: chosen.codec(p.name)[0] for p in parameters if not policy.rule(p)}
    return [found[p.name] for p in parameters]


def all_reduce(
    rows: torch.Tensor, parameters: Sequence[Parameter], chosen: Sequence[Codec]
) -> torch.Tensor:
    """Return the mean of the rows, reduced by a group with one rank per row."""
    store, data = Store.local(), rows.clone()

    def rank_main(rank: int) -> None:
        with Communicator(store, rank, len(rows), transport="local") as group:
            pieces = []
            for i, (p, codec) in enumerate(zip(parameters, chosen, strict=True)):
                has_residual = not codec.unbiased and codec.spec() != parse_codec(EXACT).spec()
                mine, owners = [torch.zeros(p.numel) if has_residual else None for _ in range(2)]
                pieces.append(Piece(p.numel, codec, tensor=i, residual=mine, owner_residual=owners))
            group.all_reduce_coded(data[rank], pieces, average=True, seed=1, step=1)

    threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return data[0]


def ring(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of the rows, reduced by a ring that codes all its messages in MXFP8."""
    ranks, numel = rows.shape
    codec, length = parse_codec("mxfp8"), -(-numel // ranks // 32) * 32
    result = torch.empty(numel)

    def sent(x: torch.Tensor) -> torch.Tensor:
        return codec.decode(codec.encode(x), x.numel())

    for chunk in range(ranks):
        span = slice(chunk * length, min((chunk + 1) * length, numel))
        total = rows[chunk, span].clone()
        for i in range(1, ranks):
            total = sent(total) + rows[(chunk + i) % ranks, span]
        result[span] = sent(total / ranks)
    return result


def error(result: torch.Tensor, rows: torch.Tensor) -> float:
    """Return the relative squared error of a result against the exact mean of the rows."""
    mean = rows.double().mean(0)
    return float((result - mean).square().sum() / mean.square().sum())


def measured() -> Iterator[dict[str, Any]]:
    parameters, found = gradients([STEP - STALE, STEP])
    numel = sum(p.numel for p in parameters)
    for ranks in RANKS:
        rows = found[STEP][:ranks]
        unit = error(ring(rows), rows)
        bits = 8 * parse_codec("mxfp8").encoded_bytes(numel) / numel
        results = [(RING, bits, unit)]
        for text in TEXTS:
            chosen = codecs(text, parameters, found[STEP - STALE][:ranks])
            sizes = (c.encoded_bytes(p.numel) for p, c in zip(parameters, chosen, strict=True))
            result = all_reduce(rows, parameters, chosen)
            results.append((text, 8 * sum(sizes) / numel, error(result, rows)))
        for label, bits, off in results:
            yield {
                "ranks": ranks,
                "count": numel,
                "codec": label,
                "bits": bits,
                "error": off,
                "ratio": off / unit,
            }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.reduced", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--csv", type=Path, help="append all rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.reduced", *argv]))
    torch.set_num_threads(1)  # sums have one order, so every run has the same gradients
    records = []
    print(f"{'ranks':>5} {'codec':<30} {'bits':>6} {'error':>9} {'ratio':>6}")
    for row in measured():
        print(
            f"{row['ranks']:>5} {row['codec']:<30} {row['bits']:>6.3f} {row['error']:>9.2e} "
            f"{row['ratio']:>6.2f}",
            flush=True,
        )
        records.append(row | vars(origin))
    if options.csv:
        tables.append(options.csv, records)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
