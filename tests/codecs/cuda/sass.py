"""Counts in a kernel's SASS: what a thread runs for its values, registers and stack, without a GPU.

Counted is the longest path through the kernel that its call can take, makes given accesses of
memory and calls nothing. What the arguments of the call decide is followed (known.py): the form of
the residuals, whether contributions are averaged, that the arrays are aligned and the first tile is
whole. What the values decide stays open, so that the count is an upper bound, but for the accesses:
they leave out the paths of blocks that hold Inf or NaN (or, with eden, 2^64), which load residuals
once more, and store them value by value. Each loop is run once. Slow paths of divisions, and those
of warps that diverge, are left out. An average is that of one contribution, with 2 as the divisor:
one that is no power of two costs a division for each value.

``budgets.csv`` has the kernels, their accesses, and the counts that they may not exceed, with nvcc
13.0. ``calls.csv`` has the calls that they make up: the bytes that a value moves, the share of a
copy's speed that is wanted, the instructions for a value that this leaves time for, and those that
were counted. ``python -m tests.codecs.cuda.sass`` writes the counts of the kernels as they are.
"""

from __future__ import annotations

import csv
import ctypes
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

import pycomm
from pycomm import _C
from pycomm._C import Launch, recorded
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.base import Codec
from pycomm.codecs.cuda.sources import source_file
from tests.codecs.cuda.emulated import decode_launches, encode_launches
from tests.codecs.cuda.known import decided
from tests.codecs.cuda.ptx import cuobjdump, run_nvcc

LINE = re.compile(
    r"^\s*/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE
)
FREE = ("load4", "store4", "barrier")  # accesses of 4 bytes and fewer; barriers of a block
TABLES = ("BRX", "BRXU")
BUDGETS = Path(__file__).with_name("budgets.csv")
CALLS = Path(__file__).with_name("calls.csv")
# Thread instructions of an H200 for each byte that a copy moves: 30.9e12 and 3.9e12 a second.
PER_BYTE = 7.92


# (instructions, shuffles) of a path, by how often it makes each kind of access
Paths = dict[tuple[int, ...], tuple[int, int]]


class Counts(NamedTuple):
    """A path's instructions and shuffles, and the kernel's registers and bytes of stack."""

    instructions: int
    shuffles: int
    registers: int
    stack: int


class Budget(NamedTuple):
    """A row of budgets.csv."""

    arch: int
    call: str
    source: str
    kernel: str
    accesses: dict[str, int]
    values: int  # of a thread
    part: float  # of the threads take this path
    most: Counts


class Call(NamedTuple):
    """A row of calls.csv, but for what is computed."""

    call: str
    spec: str
    op: str
    bytes: float  # that a value moves
    share: float  # of a copy's speed

    @property
    def allowed(self) -> float:
        """Instructions for a value that leave time for this share."""
        return PER_BYTE * self.bytes / self.share

    def counted(self, rows: list[Budget], arch: int) -> float:
        """Return the instructions for a value in the call's kernels."""
        return sum(
            row.most.instructions / row.values * row.part
            for row in rows
            if (row.call, row.arch) == (self.call, arch)
        )


def access(op: str) -> str | None:
    """Return the kind of an instruction's access of global memory, if paths are told by it."""
    word, *modifiers = op.split(".")
    if word not in ("LDG", "STG"):
        return "barrier" if word == "BAR" else None
    size = next((name for bits, name in (("128", "16"), ("64", "8")) if bits in modifiers), "4")
    return {"LDG": "load", "STG": "store"}[word] + size


class Kernel:
    """A kernel's instructions as a graph, in a call with given arguments or in any."""

    def __init__(self, sass: str, arguments: bytes | None = None, arch: int = 90) -> None:
        lines = [(int(at, 16), guard, op, rest) for at, guard, op, rest in LINE.findall(sass)]
        place = {at: i for i, (at, *_) in enumerate(lines)}
        self.ops = [op for _, _, op, _ in lines]
        self.next: list[list[int]] = []
        for i, (_, guard, op, rest) in enumerate(lines):
            follows = [i + 1] if i + 1 < len(lines) else []
            word = op.split(".")[0]
            target = re.search(r"0x([0-9a-f]+)\s*$", rest)
            if word == "BRA" and op != "BRA.DIV" and target is not None:
                sometimes = guard or re.match(r"\s+!?U?P\d", rest)
                follows = [place[int(target[1], 16)], *(follows if sometimes else [])]
            elif word in (*TABLES, "CALL") or (word in ("EXIT", "RET", "BRA") and not guard):
                follows = [i + 1] if op == "BRA.DIV" else []
            self.next.append(follows)
        # A jump by a table leads to any instruction that no other one leads to.
        led_to = {0, *(each for follows in self.next for each in follows)}
        for i, op in enumerate(self.ops):
            if op.split(".")[0] in TABLES:
                self.next[i] = [each for each in range(len(lines)) if each not in led_to]
        if arguments is not None:
            self.next = decided(lines, self.next, arguments, arch)

    def longest(self, accesses: dict[str, int]) -> tuple[int, int] | None:
        """Return (instructions, shuffles) of the longest path with these accesses.

        Args:
            accesses: how many of each kind: ``load16``, ``store16``, ``load8``, ``store8`` (0 of
                those that are not named), and those of FREE (any number if not named).
        """
        kinds = [
            *("load16", "store16", "load8", "store8"),
            *(kind for kind in FREE if kind in accesses),
        ]
        wanted = tuple(accesses.get(kind, 0) for kind in kinds)
        order, backward = self._order()
        found: list[Paths] = [{} for _ in self.ops]
        for i in reversed(order):
            op = self.ops[i]
            best: Paths = {}
            if op == "EXIT":
                best[(0,) * len(kinds)] = (0, 0)
            for successor in self.next[i]:
                if (i, successor) not in backward:
                    for made, path in found[successor].items():
                        best[made] = max(best.get(made, (0, 0)), path)
            kind = access(op)
            for before, (length, shuffles) in best.items():
                now = tuple(n + (kind == each) for n, each in zip(before, kinds, strict=True))
                if all(n <= most for n, most in zip(now, wanted, strict=True)):
                    found[i][now] = (length + 1, shuffles + op.startswith("SHFL"))
        return found[0].get(wanted)

    def accesses(self) -> Counter[str]:
        """Return how often each kind of access stands in the kernel."""
        return Counter(kind for op in self.ops if (kind := access(op)) is not None)

    def _order(self) -> tuple[list[int], set[tuple[int, int]]]:
        """Return what can be reached, each before those that follow it, and the jumps back."""
        order: list[int] = []
        state = [0] * len(self.ops)  # 1: on the way, 2: done
        state[0] = 1
        backward: set[tuple[int, int]] = set()
        stack = [(0, iter(self.next[0]))]
        while stack:
            i, successors = stack[-1]
            for successor in successors:
                if state[successor] == 1:
                    backward.add((i, successor))
                elif state[successor] == 0:
                    state[successor] = 1
                    stack.append((successor, iter(self.next[successor])))
                    break
            else:
                state[i] = 2
                order.append(i)
                stack.pop()
        return order[::-1], backward


# ---------------------------------------------- the arguments of the kernels of a call

NUMEL = 1 << 16  # many tiles: the first one is whole
# Of the residual, by the op of a call. By default that of a large parameter is kept in int8.
STORAGES = {"encode_feedback": "float32", "encode_int8": "int8", "own": "float32"}


class EncodeParams(ctypes.Structure):
    """A batch of one tensor: BatchHead, and the start of EncodeParams (csrc/codecs/base)."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("count", "swapped", "blocks", "in")),
        *((name, ctypes.c_uint64) for name in ("residual", "new_residual", "scales", "codes")),
        *((name, ctypes.c_uint64) for name in ("payloads", "stride", "numel", "seed", "group")),
        *((name, ctypes.c_uint32) for name in ("step", "tensor", "block_bits", "options")),
        *(("ranks", ctypes.c_uint32), ("divisor", ctypes.c_float)),
    )


@cache
def arguments_of(spec: str, op: str) -> dict[str, bytes]:
    """Return the arguments of each kernel of a call, by the kernel's name.

    Args:
        spec: of the codec.
        op: ``encode`` and ``decode``; ``encode_feedback`` with a residual of float32, and
            ``encode_int8`` of int8; ``own``, as the first of these, of the average of one
            contribution by 2. None of another call is known.
    """
    if op not in ("encode", "decode", *STORAGES):
        return {}
    codec = pycomm.codec(spec)
    x = torch.zeros(NUMEL)
    payload = torch.zeros(codec.encoded_bytes(NUMEL), dtype=torch.uint8)
    room = torch.zeros(codec.native.scratch_bytes(NUMEL) + 16, dtype=torch.uint8)
    if op == "decode":
        launches = decode_launches(codec, payload, x, room, add=False)
    elif op == "encode" or codec.name in ("lossless", "topk"):  # with arguments of their own
        residual = None if op == "encode" else torch.zeros_like(x)
        args = EncodeArgs(x, payload, residual, residual, RandomKey(), 0)
        launches = encode_launches(codec, args, room)
    else:
        launches = _with_feedback(codec, x, payload, STORAGES[op])
        return {launch.kernel: _completed(launch, payload, op == "own") for launch in launches}
    return {launch.kernel: launch.params for launch in launches}


def _with_feedback(
    codec: Codec, x: torch.Tensor, payload: torch.Tensor, storage: str
) -> list[Launch]:
    old, fresh = torch.zeros(2, NUMEL)  # int8 needs less
    return recorded(
        lambda: codec.native.encode(
            x.data_ptr(),
            x.numel(),
            payload.data_ptr(),
            kind=_C.FeedbackKind.residual,
            storage=_C.FeedbackStorage.__members__[storage],
            decay=1.0,
            error=(old.data_ptr(), fresh.data_ptr()),
            stream=0,
        )
    )


def _completed(launch: Launch, payload: torch.Tensor, average: bool) -> bytes:
    """Return the arguments of an encode as the engine makes them: with a flag that says which
    residual is the old one; and as those of the average of a contribution."""
    arguments = bytearray(launch.params)
    params = EncodeParams.from_buffer(arguments)
    assert (params.count, params.numel, params.ranks) == (1, NUMEL, 0)
    params.swapped = payload.data_ptr()
    if average:
        params.payloads, params.stride = payload.data_ptr(), payload.numel()
        params.ranks, params.divisor = 1, 2.0
    return bytes(arguments)


# ------------------------------------------------------------------ counts


def compile_kernels(source: str, kernels: list[str], arch: int, folder: Path) -> Path:
    """Compile some kernels of a .cu file of csrc, by their names in its table."""
    file = folder / f"{source}-{arch}.cu"
    table = ", ".join(f"reinterpret_cast<const void*>({kernel})" for kernel in kernels)
    file.write_text(
        '#define PYCOMM_KERNELS(...) static_assert(true, "")\n'  # in place of the whole table
        f'#include "{source_file(source)}"\n'
        f"namespace pycomm::codecs {{ const void* const compiled[] = {{{table}}}; }}\n"
    )
    run_nvcc(file, folder, [arch])
    return file.with_suffix(".o")


def functions(binary: Path, what: str) -> dict[str, str]:
    """Return what cuobjdump says of each kernel, by its name in the table of its .cu file."""
    said = subprocess.run(
        [str(cuobjdump()), what, str(binary)], check=True, capture_output=True, text=True
    ).stdout
    mangled, texts = (re.split(r"Function\s*:?\s+(\w+)", said)[part::2] for part in (1, 2))
    names = subprocess.run(
        ["c++filt"], input="\n".join(mangled), check=True, capture_output=True, text=True
    ).stdout
    for of_nvcc, ours in (
        ("pycomm::codecs::", ""),
        ("pycomm::SmallFloat<2, 1, (pycomm::Last)2>", "pycomm::Float4E2M1"),
    ):
        names = names.replace(of_nvcc, ours)
    short = [name.removeprefix("void ").split("(")[0] for name in names.splitlines()]
    return dict(zip(short, texts, strict=True))


def count(binary: Path, rows: list[Budget]) -> list[Counts]:
    """Return the counts of each kernel, on its path with the given accesses."""
    sass, usage = functions(binary, "--dump-sass"), functions(binary, "--dump-resource-usage")
    known = {call.call: call for call in calls()}
    counts = []
    for row in rows:
        call = known[row.call]
        launched = arguments_of(call.spec, call.op)
        assert not launched or row.kernel in launched, f"{call} launches {list(launched)}"
        arguments = launched.get(row.kernel)
        kernel = Kernel(sass[row.kernel], arguments, row.arch)
        path = kernel.longest(row.accesses)
        assert path is not None, f"{row.kernel}: no path has {row.accesses}: {kernel.accesses()}"
        used = dict(re.findall(r"(\w+):(\d+)", usage[row.kernel]))
        counts.append(Counts(*path, int(used["REG"]), int(used["STACK"])))
    return counts


def budgets() -> list[Budget]:
    """Read budgets.csv."""
    with BUDGETS.open() as file:
        return [
            Budget(
                *(int(row["arch"]), row["call"], row["source"], row["kernel"]),
                {kind: int(n) for kind, n in re.findall(r"(\w+)=(\d+)", row["accesses"])},
                *(int(row["values"]), float(row["part"])),
                Counts(*(int(row[name]) for name in Counts._fields)),
            )
            for row in csv.DictReader(file)
        ]


def calls() -> list[Call]:
    """Read calls.csv."""
    with CALLS.open() as file:
        return [
            Call(row["call"], row["spec"], row["op"], float(row["bytes"]), float(row["share"]))
            for row in csv.DictReader(file)
        ]


def counted(rows: list[Budget]) -> Iterator[tuple[Budget, Counts]]:
    """Compile the kernels of budgets of one arch, and yield each with its counts."""
    with tempfile.TemporaryDirectory() as folder:
        for source in dict.fromkeys(row.source for row in rows):
            own = [row for row in rows if row.source == source]
            kernels = list(dict.fromkeys(row.kernel for row in own))
            binary = compile_kernels(source, kernels, own[0].arch, Path(folder))
            yield from zip(own, count(binary, own), strict=True)


def write(path: Path, lines: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def summary(rows: list[Budget]) -> list[list[str]]:
    """Return calls.csv with the counts of these rows."""
    archs = list(dict.fromkeys(row.arch for row in rows))
    lines = [[*Call._fields, "allowed", *(f"sm_{arch}" for arch in archs)]]
    for call in calls():
        counted = [f"{call.counted(rows, arch):.1f}" for arch in archs]
        lines.append([*map(str, call), f"{call.allowed:.1f}", *counted])
    return lines


def main() -> None:
    """Write the counts as they are, of the archs in the command or of those in the file."""
    old = budgets()
    known = list(dict.fromkeys(row.arch for row in old))
    first = [row for row in old if row.arch == known[0]]
    lines = [[*Budget._fields[:-1], *Counts._fields]]
    new = []
    for arch in map(int, sys.argv[1:]) if len(sys.argv) > 1 else known:
        of_arch = [row for row in old if row.arch == arch]
        for row, counts in counted(of_arch or [row._replace(arch=arch) for row in first]):
            new.append(row._replace(most=counts))
            text = " ".join(f"{kind}={n}" for kind, n in row.accesses.items())
            fields = (arch, row.call, row.source, row.kernel, text, row.values, row.part, *counts)
            lines.append([str(field) for field in fields])
    write(BUDGETS, lines)
    write(CALLS, summary(new))


if __name__ == "__main__":
    main()
