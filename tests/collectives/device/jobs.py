"""Ranks of a device group, which are threads, and their jobs, for the CPU and for GPUs.

Each has a GPU or, on the CPU, shared memory. A job gets a Rank and works on numpy arrays that it
has put on the rank's device, so that one suite runs on both. On the CPU the kernels are the GPU's,
compiled by the C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import pycomm
from pycomm import _C, _test
from tests import ranks
from tests.collectives import ways
from tests.collectives.ways import REDUCIBLE, TYPES, contribution, integers

Job = Callable[["Rank"], Any]
ARENA = 64 << 20
# Slots are a few kilobytes, so larger data take many rounds.
OPTIONS = {"timeout": 20.0, "blocks": 3, "staging_bytes": 3 * 2 * 4096, "coded_bytes": 1 << 16}


class Buffer:
    """The bytes of an array in a rank's device memory, at an offset from an aligned address."""

    def __init__(self, rank: Rank, array: np.ndarray, shift: int = 0) -> None:
        self.rank, self.dtype, self.shape = rank, array.dtype, array.shape
        flat = np.frombuffer(array.tobytes(), dtype=np.uint8)
        self.shift, self.bytes = shift, flat.size
        if rank.cuda:
            self.memory = rank.take(flat.size + 16)
            rank.copy(self.memory[shift : shift + flat.size], flat.copy())
            start = self.memory.data_ptr()
        else:
            room = np.zeros(flat.size + 80, dtype=np.uint8)
            self.memory = room[-room.ctypes.data % 16 :]
            self.memory[shift : shift + flat.size] = flat
            start = self.memory.ctypes.data
        self.address = start + shift

    def get(self) -> np.ndarray:
        self.rank.synchronize()
        flat = self.memory[self.shift : self.shift + self.bytes]
        if self.rank.cuda:
            flat = self.rank.fetch(flat)
        return np.frombuffer(flat.tobytes(), dtype=self.dtype).reshape(self.shape)


class Rank:
    """One rank: `group` is its device group, `stream` the stream of its work."""

    def __init__(
        self, store: _C.Store, rank: int, size: int, *, cuda: bool = False, **options: Any
    ) -> None:
        self.rank, self.size, self.cuda, self.stream = rank, size, cuda, 0
        if cuda:
            import torch

            self.torch_stream = torch.cuda.Stream()
            self.stream = self.torch_stream.cuda_stream
            # Memory is allocated before the rendezvous: allocations may wait for peers' kernels.
            self.arena, self.used = torch.zeros(ARENA, dtype=torch.uint8, device="cuda"), 0
            # So may a copy of memory that is not pinned, while it holds the driver's lock.
            self.pinned = torch.empty(ARENA, dtype=torch.uint8, pin_memory=True)
            torch.cuda.synchronize()
        index = 0 if cuda else -1
        self.group = _test.DeviceGroup(store, rank, size, index, **{**OPTIONS, **options})

    def put(self, array: np.ndarray, shift: int = 0) -> Buffer:
        return Buffer(self, array, shift)

    def take(self, size: int) -> Any:
        begin = self.used
        self.used += -(-size // 256) * 256
        assert self.used <= ARENA, "the job needs a larger arena"
        return self.arena[begin : begin + size]

    def pinned_for(self, tensor: Any) -> Any:
        """Return pinned memory with the place of a tensor in the arena."""
        begin = tensor.data_ptr() - self.arena.data_ptr()
        return self.pinned[begin : begin + tensor.numel()]

    def copy(self, to: Any, array: np.ndarray) -> None:
        import torch

        pinned = self.pinned_for(to)
        pinned.copy_(torch.from_numpy(array))
        with torch.cuda.stream(self.torch_stream):
            to.copy_(pinned, non_blocking=True)

    def fetch(self, tensor: Any) -> np.ndarray:
        import torch

        pinned = self.pinned_for(tensor)
        with torch.cuda.stream(self.torch_stream):
            pinned.copy_(tensor, non_blocking=True)
        self.torch_stream.synchronize()
        return pinned.numpy().copy()

    def call(self, op: str, *args: Any, **kwargs: Any) -> None:
        coded = op.endswith("_coded")
        run = self.group.run_coded if coded else self.group.run
        run(op.removesuffix("_coded"), *args, **kwargs, stream=self.stream)

    def all_reduce(self, x: Buffer, op: str = "sum", dtype: str = "float32", **more: Any) -> None:
        """Reduce a buffer in place."""
        kind = _C.DType.__members__[dtype], _C.ReduceOp.__members__[op]
        self.call("all_reduce", x.address, x.address, x.shape[0], *kind, **more)

    def synchronize(self) -> None:
        if self.cuda:
            self.torch_stream.synchronize()
        self.group.check()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()


attempt = partial(ranks.attempt, member=Rank)
run = partial(ranks.run, member=Rank)


def run_processes(size: int, job: Job, *, cuda: bool = False, **options: Any) -> list[Any]:
    """Run as `run` does, on processes."""
    method = "spawn" if cuda else "fork"
    return ranks.run_processes(
        size, job, member=Rank, limit=100, method=method, cuda=cuda, **options
    )


# --------------------------------------------------------------------------------- jobs


DType, ReduceOp = _C.DType, _C.ReduceOp
ALGOS = ["one_shot", "two_shot"]
SIZES = [0, 1, 3, 17, 1000, 4099, 30011]


def own_factor(rank: int) -> float:
    return 0.3 + rank


def folded(inputs: list[np.ndarray], dtype: str, op: str) -> np.ndarray:
    """Reduce in rank order on the CPU; premul_sum scales each input by its rank's factor first."""
    kind, inputs = getattr(DType, dtype), [x.copy() for x in inputs]
    for r, x in enumerate(inputs if op == "premul_sum" else []):
        _C.scale(kind, x.ctypes.data, x.ctypes.data, x.size, own_factor(r))
    return ways.folded(kind, getattr(ReduceOp, op), inputs)


def reduce_all_types(c: Rank) -> int:
    """Reduce every type with each of its ops; compare with the CPU's reduction in rank order."""
    numel, done = 391, 0
    for dtype in TYPES:
        inputs = [contribution(r, numel, dtype) for r in range(c.size)]
        for op in (op.name for kind, op in REDUCIBLE if kind.name == dtype):
            want = folded(inputs, dtype, op)
            for algo in ALGOS:
                x = c.put(inputs[c.rank])
                c.all_reduce(x, op, dtype, factor=own_factor(c.rank), algo=algo)
                got = x.get()
                assert got.tobytes() == want.tobytes(), (dtype, op, algo)
                done += 1
    return done


def reduce_sizes(c: Rank) -> None:
    """Reduce with every algorithm at odd sizes, also in memory not aligned to 16 bytes."""
    for numel in SIZES:
        want = sum(integers(r, numel) for r in range(c.size))
        for algo in ALGOS:
            for shift in (0, 4):
                x = c.put(integers(c.rank, numel), shift)
                c.all_reduce(x, algo=algo)
                assert np.array_equal(x.get(), want), (numel, algo, shift)


def part_sizes(c: Rank, numel: int) -> list[int]:
    """Return a different size per rank, one of which is 0."""
    return [(r * 7919 + 13) % (numel + 1) if r != 1 else 0 for r in range(c.size)]


def parts(buffers: list[Buffer]) -> _C.Parts:
    return _C.Parts([(b.address, b.shape[0]) for b in buffers])


def reduce_and_scatter(c: Rank) -> None:
    kinds = [("float32", "avg"), ("float32", "premul_sum"), ("bfloat16", "premul_sum")]
    for numel, (dtype, op) in product((5, 3001), kinds):
        kind, factor = (getattr(DType, dtype), getattr(ReduceOp, op)), own_factor(c.rank)
        sizes = part_sizes(c, numel)
        inputs = [
            [contribution(r * 50 + p, n, dtype) for p, n in enumerate(sizes)] for r in range(c.size)
        ]
        ours = [c.put(x) for x in inputs[c.rank]]
        out = c.put(np.zeros_like(inputs[c.rank][c.rank]))
        c.call("reduce_scatter", parts(ours), out.address, sizes[c.rank], *kind, factor=factor)
        want = folded([inputs[r][c.rank] for r in range(c.size)], dtype, op)
        assert out.get().tobytes() == want.tobytes(), (numel, dtype, op)
        for x, unchanged in zip(ours, inputs[c.rank], strict=True):
            assert x.get().tobytes() == unchanged.tobytes()
        for root in range(c.size):
            whole = [contribution(r, numel, dtype) for r in range(c.size)]
            x, y = c.put(whole[c.rank]), c.put(np.zeros_like(whole[0]))
            c.call("reduce", x.address, y.address, numel, *kind, root, factor=factor)
            want = folded(whole, dtype, op) if root == c.rank else np.zeros_like(whole[0])
            assert np.array_equal(y.get(), want), (numel, dtype, op, root)
            assert np.array_equal(x.get(), whole[c.rank])


def moves(c: Rank) -> None:
    """Call every collective that moves data, with parts of all sizes."""
    for numel in (1, 37, 9001):
        sizes = part_sizes(c, numel)
        mine = c.put(integers(c.rank, sizes[c.rank], "i4"))
        out = [c.put(np.zeros(n, dtype="i4"), shift=4 * (r % 2)) for r, n in enumerate(sizes)]
        c.call("all_gather", mine.address, parts(out), sizes[c.rank], DType.int32)
        for r, n in enumerate(sizes):
            assert np.array_equal(out[r].get(), integers(r, n, "i4")), (numel, r)

        def cell(a: int, b: int, numel: int = numel) -> np.ndarray:
            return integers(a * 20 + b, (a * 31 + b * 17 + numel) % (numel + 1), "i8")

        sent = [c.put(cell(c.rank, r)) for r in range(c.size)]
        came = [c.put(np.zeros_like(cell(r, c.rank))) for r in range(c.size)]
        c.call("all_to_all", parts(sent), parts(came), 0, DType.int64)
        for r in range(c.size):
            assert np.array_equal(came[r].get(), cell(r, c.rank)), (numel, r)

        for root in range(c.size):
            x = c.put(integers(c.rank, numel, "i4"))
            c.call("broadcast", x.address, x.address, numel, DType.int32, root=root)
            assert np.array_equal(x.get(), integers(root, numel, "i4")), (numel, root)

            y = c.put(np.zeros_like(cell(root, c.rank)))
            c.call("scatter", parts(sent), y.address, y.shape[0], DType.int64, root=root)
            assert np.array_equal(y.get(), cell(root, c.rank)), (numel, root)

            own = sent[root]
            out = [c.put(np.zeros_like(cell(r, root))) for r in range(c.size)]
            c.call("gather", own.address, parts(out), own.shape[0], DType.int64, root=root)
            for r in range(c.size if root == c.rank else 0):
                assert np.array_equal(out[r].get(), cell(r, root)), (numel, r)
        c.call("barrier")


def mixture(c: Rank) -> None:
    """Queue operations of all kinds in direct succession, before checking any."""
    random = np.random.default_rng(5)  # equal on all ranks
    checks = []
    for step in range(60):
        numel = int(random.integers(1, 6000))
        kind = random.choice([*ALGOS, "all_gather", "barrier", "reduce_scatter"])
        if kind == "barrier":
            c.call("barrier")
        elif kind == "all_gather":
            out = [c.put(np.zeros(numel, dtype="f4")) for _ in range(c.size)]
            x = c.put(integers(c.rank + step, numel))
            c.call("all_gather", x.address, parts(out), numel, DType.float32)
            checks += [(step, b, integers(r + step, numel)) for r, b in enumerate(out)]
        elif kind == "reduce_scatter":
            ours = [c.put(integers(c.rank + p + step, numel)) for p in range(c.size)]
            out = c.put(np.zeros(numel, dtype="f4"))
            c.call("reduce_scatter", parts(ours), out.address, numel, DType.float32, ReduceOp.sum)
            want = sum(integers(r + c.rank + step, numel) for r in range(c.size))
            checks.append((step, out, want))
        else:
            x = c.put(integers(c.rank + step, numel))
            c.all_reduce(x, algo=kind)
            checks.append((step, x, sum(integers(r + step, numel) for r in range(c.size))))
    for step, buffer, want in checks:
        assert np.array_equal(buffer.get(), want), step


# ------------------------------------------------------------------------------- codecs

SEED, STEP = 0x1234567890ABCDEF, 11
TENSORS = {7: 1000, 3: 1, 9: 4099, 4: 0, 1: 128, 2: 20011}
# There are codecs of every combine; those of granule 0 take a whole tensor.
SPECS = [
    "int8",
    "int4:block=64,rounding=stochastic",
    "fp16",
    "sign",
    "mxfp8",
    "topk:0.05",
    "lossless",
]


def converted(array: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert floats between dtypes; those that numpy lacks are held as uint16."""
    dtypes = _C.DType.__members__
    out = np.empty(array.shape, dtype="f4" if target == "float32" else "u2")
    array = np.ascontiguousarray(array)
    addresses = array.ctypes.data, dtypes[source], out.ctypes.data, dtypes[target]
    one = (0, 1.0)
    _C.convert(*addresses, array.size, by=one, clip=one, divisor=1.0, found_inf=0)
    return out


class Bucket:
    """One rank's gradients and residuals on its device, and the pieces that refer to them.

    Gradients have values of `dtype`; if `wide` they are stored as float32.
    """

    def __init__(
        self,
        c: Rank,
        specs: list[str],
        rows: int = 1,
        feedback: bool = True,
        dtype: str = "float32",
        wide: bool = False,
    ) -> None:
        numel = sum(TENSORS.values())
        random = np.random.default_rng([c.rank, rows])
        sparse = random.random((rows, numel)) < 0.5
        data = (random.standard_normal((rows, numel)) * sparse).astype("f4")
        data = converted(data, "float32", dtype)
        self.data = c.put(converted(data, dtype, "float32") if wide else data)
        self.pieces, self.residuals = _C.Pieces(), []
        self.codecs = [_C.Codec(pycomm.codec(spec).spec()) for spec in specs]
        for i, (tensor, size) in enumerate(TENSORS.items()):
            addresses = [0, 0]
            if feedback:
                kept = random.standard_normal((rows, size)).astype("f4") / 50
                owner = np.zeros(size, dtype="f4")
                self.residuals += [c.put(kept), c.put(owner)]
                addresses = [buffer.address for buffer in self.residuals[-2:]]
            self.pieces.add(
                size,
                self.codecs[i % len(specs)],
                tensor=tensor,
                worker=(addresses[0],) * 2,
                owner=(addresses[1],) * 2,
            )

    def bytes(self, *results) -> list[bytes]:
        """Return the bytes of the results, and of the residuals that only this rank has written."""
        return [buffer.get().tobytes() for buffer in (*results, *self.residuals)]


KEY = {"seed": SEED, "step": STEP}


def coded(
    c: Rank, specs: list[str], feedback: bool = True, dtype: str = "float32", wide: bool = False
) -> list[list[bytes]]:
    """Run both operations with codecs; the pieces cycle through `specs`.

    With `wide`, float32 buffers hold values of `dtype`, to which the results are rounded.
    """
    numel = sum(TENSORS.values())
    travels = "float32" if wide else dtype
    options = {**KEY, "dtype": _C.DType.__members__[travels]}

    def call(op: str, bucket: Bucket, out: int = 0) -> None:
        more = {}
        if c.cuda:
            name = op.removesuffix("_coded")
            scratch = c.group.coded_scratch_bytes(name, bucket.pieces, options["dtype"])
            more["scratch"] = (c.take(scratch).data_ptr(), scratch)
        c.call(
            op, bucket.data.address, out or bucket.data.address, bucket.pieces, **options, **more
        )

    def ended(bucket: Bucket, result: Buffer) -> list[bytes]:
        values = result.get()
        if wide:
            values = converted(values, "float32", dtype)
        return [values.tobytes(), *bucket.bytes()]

    first = Bucket(c, specs, 1, feedback, dtype, wide)
    call("all_reduce_coded", first)

    second = Bucket(c, specs, c.size, feedback, dtype, wide)
    out = c.put(np.zeros(numel, dtype="f4" if travels == "float32" else "u2"))
    call("reduce_scatter_coded", second, out.address)
    return [ended(first, first.data), ended(second, out)]
