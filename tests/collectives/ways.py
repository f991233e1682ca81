"""The ways that a collective can take, as options of the communicator, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from operator import mul
from typing import TypeVar

import numpy as np

from pycomm import _C

T = TypeVar("T")

RANKS = [1, 2, 3, 4, 7, 8]

WAYS = {
    "window": {"transport": "shm"},
    "direct": {"transport": "shm", "algo": "direct"},
    "ring": {"transport": "shm", "algo": "ring"},
    "tcp": {"transport": "tcp", "sockets": 1},
    "tcp-ring": {"transport": "tcp", "algo": "ring"},
}
# The algorithms of each collective; the others choose `auto`.
ALGOS_OF = {
    "all_reduce": ["one_shot", "two_shot", "bruck", "ring"],
    "reduce_scatter": ["one_shot", "ring"],
    "all_gather": ["one_shot", "bruck", "ring"],
    "broadcast": ["one_shot", "two_shot", "tree"],
    "reduce": ["one_shot", "two_shot"],
    "barrier": ["one_shot", "bruck"],
}
# Segments of a hundred elements: many in a chunk, the last one shorter.
TINY = {"segment_bytes": 404}

# Each type with the numpy type that holds its bits.
TYPES = {
    name: f"u{_C.size_of(dtype)}" if name.startswith(("float8", "float16", "bf", "bool")) else name
    for name, dtype in _C.DType.__members__.items()
}

# The bits of the canonical NaN, and by how many bits of a part those of any NaN are recognised.
CANONICAL = {
    "float32": ("u4", 0x7FC00000, 0x7F800000),
    "float64": ("u8", 0x7FF8000000000000, 0x7FF0000000000000),
    "float16": ("u2", 0x7E00, 0x7C00),
    "bfloat16": ("u2", 0x7FC0, 0x7F80),
    "float8_e5m2": ("u1", 0x7E, 0x7C),
    "float8_e4m3": ("u1", 0x7F, 0x7F),
    "complex64": ("u4", 0x7FC00000, 0x7F800000),
    "complex128": ("u8", 0x7FF8000000000000, 0x7FF0000000000000),
}

FLOATS = [name for name in CANONICAL if not name.startswith("complex")]
INTEGERS = [name for name in TYPES if "int" in name]
MEANINGLESS = [
    *product(FLOATS, ("band", "bor", "bxor")),
    *product(INTEGERS, ("premul_sum",)),
    *product(("bool",), ("avg", "premul_sum")),
    *product(("complex64", "complex128"), ("min", "max", "band", "bor", "bxor")),
]
REDUCIBLE = [
    (dtype, op)
    for dtype, op in product(_C.DType.__members__.values(), _C.ReduceOp.__members__.values())
    if (dtype.name, op.name) not in MEANINGLESS
]


def folded(dtype: _C.DType, op: _C.ReduceOp, inputs: list[np.ndarray]) -> np.ndarray:
    """Reduce in rank order, by the core in one process: the bits that every way must give."""
    out = np.empty_like(inputs[0])
    numel = out.nbytes // _C.size_of(dtype)
    _C.reduce(dtype, op, [x.ctypes.data for x in inputs], out.ctypes.data, numel)
    return out


def integers(rank: int, numel: int, dtype: str = "float32") -> np.ndarray:
    """Return values whose sums and products of a few are exact in every dtype that has them."""
    return kept(_integers, _many_integers, rank, numel).astype(dtype)


def floats(rank: int, numel: int) -> np.ndarray:
    """Return values over many magnitudes, whose sums change with the order."""
    return kept(_floats, _many_floats, rank, numel).copy()


def kept(few: Callable[..., T], many: Callable[..., T], rank: int, numel: int) -> T:
    """Return an input out of its cache. Each rank compares with the inputs of all ranks, in many
    tests; of large ones few are kept, since every fork of this process takes their pages along."""
    return (few if numel < 100_000 else many)(rank, numel)


def _new_integers(rank: int, numel: int) -> np.ndarray:
    return np.random.default_rng([rank, numel]).integers(0, 4, numel).astype(np.int8)


def _new_floats(rank: int, numel: int) -> np.ndarray:
    random = np.random.default_rng([rank, numel])
    return (random.standard_normal(numel) * np.exp(4 * random.standard_normal(numel))).astype("f")


_integers, _many_integers = (lru_cache(maxsize=most)(_new_integers) for most in (512, 32))
_floats, _many_floats = (lru_cache(maxsize=most)(_new_floats) for most in (256, 32))


def bits(x: np.ndarray) -> bytes:
    return x.tobytes()


def contribution(rank: int, numel: int, dtype: str) -> np.ndarray:
    """Return values over many magnitudes; for small floats all codes but those of Inf and NaN."""
    random = np.random.default_rng([rank, numel, len(dtype)])
    if dtype in ("float32", "float64"):
        return floats(rank, numel).astype(TYPES[dtype])
    if dtype.startswith("complex"):
        return (floats(rank, numel) + 1j * floats(rank + 100, numel)).astype(TYPES[dtype])
    if dtype == "bool":
        return random.integers(0, 2, numel, dtype="u1")
    if dtype == "float16":
        return floats(rank, numel).clip(-6e4, 6e4).astype("f2").view("u2")
    if dtype == "bfloat16":
        return (floats(rank, numel).view("u4") >> 16).astype("u2")
    if dtype.startswith("float8"):
        sign = random.integers(0, 2, numel, dtype="u1") << 7
        return sign | random.integers(0, 0x7B, numel, dtype="u1")
    limits = np.iinfo(TYPES[dtype])
    return random.integers(limits.min, limits.max, numel, dtype=TYPES[dtype], endpoint=True)


def calls(c, numel, root=0, dtype="float32", op="sum", new=np.ones):
    """Return each collective by its name, as a call with so many elements for each rank."""
    one, part, wide, out = (new(n, dtype) for n in 2 * [numel] + 2 * [c.size * numel])
    return {
        "all_reduce": lambda: c.all_reduce(one, op),
        "reduce_scatter": lambda: c.reduce_scatter(wide, part, op),
        "all_gather": lambda: c.all_gather(one, out),
        "all_to_all": lambda: c.all_to_all(wide, out),
        "broadcast": lambda: c.broadcast(one, root),
        "reduce": lambda: c.reduce(one, part, root, op),
        "gather": lambda: c.gather(one, out, root),
        "scatter": lambda: c.scatter(wide, part, root),
        "barrier": lambda: c.barrier(),
    }


def shared(c, values):
    array = np.asarray(c.allocate(len(values), values.dtype))
    array[:] = values
    return array


@dataclass
class Right:
    """The inputs of all ranks for a size, and what comes of them; no rank writes to these."""

    mine: list[np.ndarray]
    wide: list[np.ndarray]
    total: np.ndarray
    wide_total: np.ndarray
    joined: np.ndarray

    @classmethod
    def of(cls, ranks, n, dtype, factors):
        mine, wide = ([integers(r, m, dtype) for r in range(ranks)] for m in (n, ranks * n))
        sums = (sum(map(mul, factors, x)) if factors else sum(x) for x in (mine, wide))
        return cls(mine, wide, *sums, np.concatenate(mine))


@lru_cache(maxsize=1)
def right(ranks, sizes, dtype="float32", factors=()):
    """Return the right results of each size, which are made before the ranks begin.

    Args:
        factors: of each rank in a premul_sum. Default: a sum.
    """
    return {n: Right.of(ranks, n, dtype, factors) for n in sizes}


def check_everything(c, results, who=lambda rank: False, factors=()):
    """Check every collective against plain arithmetic, with the buffers of `who` in the heap."""
    ranks, me = c.size, c.rank
    root = ranks // 2
    how = {"op": "premul_sum", "factor": factors[me]} if factors else {}

    def place(values):
        return shared(c, values) if who(me) else values.copy()

    for n, of in results.items():
        mine, wide = of.mine[me], of.wide[me]
        own = slice(me * n, (me + 1) * n)
        after = (me + 1) % ranks  # whose part is no place of ours
        other = slice(after * n, (after + 1) * n)

        x = place(mine)
        c.all_reduce(x, **how)
        assert np.array_equal(x, of.total)

        x, out = place(wide), place(np.zeros_like(mine))
        c.reduce_scatter(x, out, **how)
        assert np.array_equal(out, of.wide_total[own])
        assert np.array_equal(x, wide)
        c.reduce_scatter(x, x[own], **how)
        assert np.array_equal(x[own], of.wide_total[own])
        x = place(wide)
        c.reduce_scatter(x, x[other], **how)
        assert np.array_equal(x[other], of.wide_total[own])

        x, out = place(mine), place(np.zeros_like(wide))
        c.all_gather(x, out)
        assert np.array_equal(out, of.joined)
        out[:] = 0
        out[own] = mine
        c.all_gather(out[own], out)
        assert np.array_equal(out, of.joined)
        out[other] = mine
        c.all_gather(out[other], out)
        assert np.array_equal(out, of.joined)

        x, out = place(wide), place(np.zeros_like(wide))
        c.all_to_all(x, out)
        assert np.array_equal(out, np.concatenate([w[own] for w in of.wide]))
        c.all_to_all(x, x)
        assert np.array_equal(x, out)

        x = place(mine)
        c.broadcast(x, root)
        assert np.array_equal(x, of.mine[root])

        x, out = place(mine), place(np.zeros_like(wide))
        c.gather(x, out, root)
        assert me != root or np.array_equal(out, of.joined)
        back = place(np.zeros_like(mine))
        c.scatter(out, back, root)
        assert np.array_equal(back, mine)
        c.scatter(out, out[other], root)
        assert np.array_equal(out[other], mine)
        c.gather(out[other], out, root)
        assert me != root or np.array_equal(out, of.joined)

        x, out = place(mine), place(np.zeros_like(mine))
        c.reduce(x, out if me == root else None, root, **how)
        assert me != root or np.array_equal(out, of.total)
        assert np.array_equal(x, mine)
        c.reduce(x, x if me == root else None, root, **how)
        assert np.array_equal(x, of.total if me == root else mine)
        c.barrier()
    return True
