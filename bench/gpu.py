"""`make gpu`: checks and times pycomm on a GPU.

    python -m pycomm.bench.gpu --results bench/results

First the suites of gpu_checks.py: the contract test for every implementation, collectives and the
backend with several ranks on the one GPU, the kernels under compute-sanitizer. Then each codec's
kernels are timed (gpu_timing.py). All of it goes to one CSV. Nothing is downloaded or installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import pycomm
from pycomm.bench import gpu_checks
from pycomm.bench.gpu_checks import Counts
from pycomm.bench.gpu_results import NO_TIMES, Row, this_machine, write
from pycomm.bench.gpu_timing import (
    bytes_moved,
    call_of,
    conversion_of,
    l2_bytes,
    measure,
    sets_needed,
    time_copy,
    topk_of_torch,
)
from pycomm.codecs import convert
from pycomm.codecs.implementations import Unavailable, implementation

KINDS = ("native", "nvrtc", "triton", "reference")
OPS = ("encode", "encode_feedback", "decode", "decode_add")
SPECS = (
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int8:rounding=stochastic",
    "int8:block=2048",
    "int4",
    "int4:rounding=stochastic",
    "int4:block=32",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "sign",
    "ternary",
    "randomk:100",
    "topk:0.01",
    "topk:0.01,values=int8,chunk=4096",
    "rotate+int4",
    "eden:bits=2",
    "eden:bits=1",
    "lossless",
)
CONVERSIONS = (
    (torch.float32, torch.float32),  # unscale and clip in place of torch's passes
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),  # the end of a compressed all-reduce
)
NUMELS = (1 << 20, 1 << 26)  # a small bucket, and one whose time is all bandwidth
REFERENCE_NUMEL = 1 << 22  # plain torch makes dozens of passes and temporaries


def time_kernel(kind: str, spec: str, op: str, numel: int, copy: float, contract: str) -> Row:
    codec = pycomm.codec(spec)
    run = implementation(codec.name, kind, "cuda")
    moved = bytes_moved(codec, op, numel)
    sets = sets_needed(moved, l2_bytes())
    seconds, method = measure([call_of(run, codec, op, numel) for _ in range(sets)])
    gbps = 1e-9 * moved / seconds
    return Row(
        kind=kind,
        contract=contract,
        codec=codec.spec(),
        op=op,
        numel=numel,
        bytes=moved,
        microseconds=round(1e6 * seconds, 3),
        gbps=round(gbps, 1),
        copy_gbps=round(copy, 1),
        share=round(gbps / copy, 3),
        method=method,
    )


def time_conversion(
    kind: str, source: torch.dtype, target: torch.dtype, numel: int, copy: float, contract: str
) -> Row:
    """Time `pycomm.convert` from one dtype to another."""
    run = convert.implementation(kind, "cuda")
    moved = numel * (source.itemsize + target.itemsize)
    calls = range(sets_needed(moved, l2_bytes()))
    seconds, method = measure([conversion_of(run, source, target, numel) for _ in calls])
    gbps = 1e-9 * moved / seconds
    times = (round(1e6 * seconds, 3), round(gbps, 1), round(copy, 1), round(gbps / copy, 3))
    name = f"{source} to {target}".replace("torch.", "")
    return Row(kind, contract, name, "convert", numel, moved, *times, method)


def time_topk(numel: int) -> Row:
    """Time torch.topk, which our top-k is compared with."""
    seconds, method = measure([topk_of_torch(numel) for _ in range(2)])
    moved, copy = 4 * numel, time_copy(numel)
    gbps = 1e-9 * moved / seconds
    times = (round(1e6 * seconds, 3), round(gbps, 1), round(copy, 1), round(gbps / copy, 3))
    return Row("torch", "", "torch.topk 1 %", "topk", numel, moved, *times, method)


def time_collectives(problems: list[str]) -> list[Row]:
    """All-reduces of several ranks on this GPU, in a process of their own; see gpu_collectives."""
    done = subprocess.run(
        [sys.executable, "-m", "pycomm.bench.gpu_collectives"],
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        problems.append(f"collectives: {done.stderr.strip()}")
    copy = time_copy(1 << 24)
    rows = []
    for line in map(json.loads, done.stdout.splitlines()):
        op = f"all_reduce of {line['ranks']} {line['algo'] or 'coded'} {line['dtype']}"
        share = round(line["gbps"] / copy, 3)
        times = (line["microseconds"], round(line["gbps"], 1), round(copy, 1), share)
        spec = line["codec"] or "none"
        rows.append(Row("ranks", "", spec, op, line["numel"], line["bytes"], *times, "events"))
        print(_line(rows[-1:]), flush=True)
    return rows


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.gpu", description="Checks and times the codecs on a GPU."
    )
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="folder of CSV")
    parser.add_argument("--kinds", type=_words(KINDS), default=KINDS, help="such as native,triton")
    parser.add_argument("--numel", type=int, nargs="+", default=NUMELS, help="values per call")
    parser.add_argument("--no-checks", action="store_true", help="time without testing first")
    parser.add_argument("--no-times", action="store_true", help="test and time nothing")
    return parser.parse_args(arguments)


def _words(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def words(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        for word in given:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r}: use {', '.join(known)}")
        return given

    return words


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("pycomm.bench.gpu: torch sees no GPU here", file=sys.stderr)
        return 2
    here = this_machine(" ".join(["python", "-m", "pycomm.bench.gpu", *arguments]))
    counts = {} if options.no_checks else check(options.kinds)
    rows = [Row("check", str(found), name, *NO_TIMES) for name, found in counts.items()]
    problems = [f"{name}: {found}" for name, found in counts.items() if not found.good]
    for kind in () if options.no_times else options.kinds:
        said = str(counts.get(f"contract {kind}", "not run"))
        for numel in (REFERENCE_NUMEL,) if kind == "reference" else options.numel:
            copy = time_copy(numel)
            rows += _time_conversions(kind, numel, copy, said, problems)
            for spec in specs_of(kind, problems):
                rows += _time_codec(kind, spec, numel, copy, said, problems)
    if not options.no_times:
        rows += [time_topk(numel) for numel in options.numel]
        rows += time_collectives(problems)
    print(f"wrote {write(options.results, here, rows)}")
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


def check(kinds: tuple[str, ...]) -> dict[str, Counts]:
    """Return what every suite said, by its name; see gpu_checks.py for the order."""
    found = gpu_checks.run([gpu_checks.contract(kind) for kind in kinds])
    for suite in gpu_checks.ranks():
        found |= gpu_checks.run([suite])
    sanitizers = gpu_checks.sanitizers()
    if not sanitizers:
        print("compute-sanitizer is not on the PATH: memcheck and racecheck are left out")
    return found | gpu_checks.run(sanitizers)


def specs_of(kind: str, problems: list[str]) -> list[str]:
    """Return what `kind` has kernels for; what it should have and lacks is a problem, told once."""
    found = []
    for spec in SPECS:
        name = pycomm.codec(spec).name
        try:
            implementation(name, kind, "cuda")
        except (ImportError, Unavailable) as reason:
            problem = f"{kind} has no {name}: {reason}"
            problems += [problem] if problem not in problems else []
        else:
            found.append(spec)
    return found


def _time_conversions(
    kind: str, numel: int, copy: float, contract: str, problems: list[str]
) -> list[Row]:
    rows = []
    for source, target in CONVERSIONS:
        try:
            rows.append(time_conversion(kind, source, target, numel, copy, contract))
        except (ImportError, RuntimeError, Unavailable) as error:
            problems.append(f"{kind} convert {source} to {target}: {error}")
    if rows:
        print(_line(rows), flush=True)
    return rows


def _time_codec(
    kind: str,
    spec: str,
    numel: int,
    copy: float,
    contract: str,
    problems: list[str],
) -> list[Row]:
    """Time the four calls; one that fails is a problem, and the others still count."""
    rows = []
    for op in OPS:
        try:
            rows.append(time_kernel(kind, spec, op, numel, copy, contract))
        except (ImportError, RuntimeError, Unavailable) as error:
            problems.append(f"{kind} {spec} {op}: {error}")
    if rows:
        print(_line(rows), flush=True)
    return rows


def _line(rows: list[Row]) -> str:
    cells = "  ".join(f"{row.op} {row.gbps:.0f} GB/s ({row.share:.0%})" for row in rows)
    return f"{rows[0].kind:<9} {rows[0].numel:>9} {rows[0].codec:<46} {cells}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
