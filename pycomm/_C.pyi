"""The torch-free core (csrc/binding). Buffers are addresses; sizes are in elements unless noted."""

from builtins import bool as _bool
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

# -- core (core/core.cpp)

class DType:
    float32: ClassVar[DType]
    float64: ClassVar[DType]
    float16: ClassVar[DType]
    bfloat16: ClassVar[DType]
    float8_e4m3: ClassVar[DType]
    float8_e5m2: ClassVar[DType]
    int8: ClassVar[DType]
    int16: ClassVar[DType]
    int32: ClassVar[DType]
    int64: ClassVar[DType]
    uint8: ClassVar[DType]
    uint16: ClassVar[DType]
    uint32: ClassVar[DType]
    uint64: ClassVar[DType]
    bool: ClassVar[DType]
    complex64: ClassVar[DType]
    complex128: ClassVar[DType]
    __members__: ClassVar[dict[str, DType]]
    name: str  # to be read only
    value: int  # to be read only

class ReduceOp:
    sum: ClassVar[ReduceOp]
    avg: ClassVar[ReduceOp]
    premul_sum: ClassVar[ReduceOp]
    prod: ClassVar[ReduceOp]
    min: ClassVar[ReduceOp]
    max: ClassVar[ReduceOp]
    band: ClassVar[ReduceOp]
    bor: ClassVar[ReduceOp]
    bxor: ClassVar[ReduceOp]
    __members__: ClassVar[dict[str, ReduceOp]]
    name: str  # to be read only
    value: int  # to be read only

def size_of(dtype: DType) -> int: ...
def reduce(
    dtype: DType, op: ReduceOp, inputs: Sequence[int], out: int, numel: int, *, copy: int = 0
) -> None: ...
def scale(dtype: DType, input: int, out: int, numel: int, factor: float) -> None: ...
def device_count() -> int: ...
def crc32c(data: bytes, before: int = 0) -> int: ...
def env() -> dict[str, Any]: ...

# The rows of csrc/core/option_table.h, with the keywords of pycomm.env.Variable.
OPTIONS: tuple[dict[str, Any], ...]

class GroupOptions:  # its attributes are the rows of csrc/core/option_table.h
    def __init__(self) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...

def traces() -> list[dict[str, Any]]: ...
def simd_level() -> str: ...

# -- codecs (core/codecs.cpp): `stream` None means the CPU, a number is a cudaStream_t; `scratch` is
# memory of scratch_bytes(numel) on cuda

class FeedbackKind:
    residual: ClassVar[FeedbackKind]
    decay: ClassVar[FeedbackKind]
    momentum: ClassVar[FeedbackKind]
    __members__: ClassVar[dict[str, FeedbackKind]]

class FeedbackStorage:
    float32: ClassVar[FeedbackStorage]
    int8: ClassVar[FeedbackStorage]
    __members__: ClassVar[dict[str, FeedbackStorage]]

class Codec:
    name: str  # to be read only, like the next five
    spec: str
    combine: Literal["recode", "gather"]
    wire_version: int
    granule: int
    variable: bool
    def __init__(self, spec: str) -> None: ...
    def encoded_bytes(self, numel: int) -> int: ...
    def scratch_bytes(self, numel: int) -> int: ...
    def encode(
        self,
        x: int,
        numel: int,
        out: int,
        *,
        error: tuple[int, int] = (0, 0),
        momentum: tuple[int, int] = (0, 0),
        kind: FeedbackKind = ...,
        storage: FeedbackStorage = ...,
        decay: float = 0.0,
        seed: int = 0,
        step: int = 0,
        tensor: int = 0,
        index: int = 0,
        stream: int | None = None,
        scratch: int = 0,
    ) -> None: ...
    def decode(
        self, payload: int, out: int, numel: int, *, stream: int | None = None, scratch: int = 0
    ) -> None: ...
    def decode_add(
        self, payload: int, out: int, numel: int, *, stream: int | None = None, scratch: int = 0
    ) -> None: ...

def codec_names() -> list[str]: ...
def codec_aliases() -> dict[str, str]: ...
def cuda_built() -> bool: ...

# One launch on cuda: blocks of CUDA_THREADS threads, with one struct as the argument.
class Launch:
    source: str  # "quant": csrc/codecs/quant.cu; to be read only, like the next three
    kernel: str  # C++ name as seen from pycomm::codecs, with template arguments
    blocks: int
    params: bytes  # the Batch of csrc/codecs/base/batch.h

# Calls a function, and returns its launches on cuda, in order; none is started. Each codec says in
# csrc/codecs/<name>.cpp which kernels a call launches, with which arguments.
def recorded(call: Callable[..., object], *args: Any) -> list[Launch]: ...

CUDA_THREADS: int

def convert(*buffers: Any, **factors: Any) -> None: ...

# -- matrices of optimizers (optim/moments.h), by addresses. The last argument of each pass says how
# many threads take it at most, or on which stream it is queued.

MOMENT_EXTRA: int
MOMENT_NUMBERS: int

class MomentUse:
    nothing: ClassVar[MomentUse]
    step: ClassVar[MomentUse]
    scale: ClassVar[MomentUse]

class Moments:
    def __init__(self, on_host: bool, /) -> None: ...
    def add(
        self,
        place: tuple[int, int],
        rows: tuple[int, int, int, int, int, int],
        addresses: Sequence[int],
        momentum: tuple[int, int],
        residual: tuple[int, int, int],
        own: tuple[int, int, int],
        /,
    ) -> None: ...
    scratch_floats: int  # to be read only
    def code(
        self, bucket: tuple[Any, ...], turns: Sequence[Any], encodes: bool, where: int, /
    ) -> None: ...
    def sent(self, values: int, dtype: DType, sendings: Sequence[Any], /, *args: int) -> None: ...
    def land(
        self, values: int, dtype: DType, unit: float, divides: bool, where: int, /
    ) -> None: ...
    def collect(self, sums: int, where: int, /) -> None: ...
    def commit(self, sums: int, how: Sequence[Any], ranks: int, where: int, /) -> None: ...
    def move(self, steps: Sequence[Any], dtype: DType, where: int, /) -> None: ...

def adamw_step(
    on_host: _bool,
    tensors: Sequence[tuple[int, ...]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    where: int,
    /,
) -> None: ...

# -- stores (core/stores.cpp)

class Store:
    @staticmethod
    def local(appends: _bool = False) -> Store: ...
    @staticmethod
    def file(folder: str) -> Store: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str, timeout: float) -> bytes: ...
    @staticmethod
    def find(
        where: str, number: int, rank: int, options: GroupOptions, timeout: float
    ) -> Store: ...

class StoreEndpoint:
    def __init__(self, address: str, options: GroupOptions) -> None: ...
    handle: str  # to be read only
    def lend(self, number: int) -> Store: ...

def tls_version(file: str = "") -> str: ...
def interfaces() -> list[tuple[str, str]]: ...
def choose_interfaces(
    names: str, one_host: _bool, candidates: Sequence[tuple[str, str]], store_host: str = ""
) -> list[tuple[str, str]]: ...

# -- communicator (core/communicator.cpp): times are in seconds, 0 is the group's timeout; a side of
# a collective is an address, of `numel` elements or of as many for each rank, or parts

def buffer(array: object, write: _bool) -> tuple[int, int, int, str]: ...

ALGOS: tuple[str, ...]  # values of PYCOMM_ALGO: csrc/core/env.h

class CommunicatorOptions(GroupOptions):
    group: str
    timeout: float
    description: str
    global_ranks: list[int]
    parent: Communicator | None
    parent_ranks: list[int]
    segment_bytes: int
    nodes: list[int]
    sites: list[int]
    def __init__(self) -> None: ...

# -- buckets of pieces with codecs, also those whose payloads Python moves (core/coded.cpp)

class Shot:
    contribution: ClassVar[Shot]
    shown: ClassVar[Shot]
    result: ClassVar[Shot]

class Pieces:
    def __init__(self) -> None: ...
    def add(
        self,
        numel: int,
        codec: Codec,
        *,
        tensor: int = 0,
        kind: FeedbackKind = ...,
        storage: FeedbackStorage = ...,
        decay: float = 0.0,
        worker: Sequence[int] = ...,
        owner: Sequence[int] = ...,
        momentum: Sequence[int] = ...,
        worker_spans: Sequence[tuple[int, int]] = ...,
        owner_spans: Sequence[tuple[int, int]] = ...,
    ) -> None: ...
    numel: int  # to be read only
    def __len__(self) -> int: ...

class CodedBucket(Pieces):
    def __init__(self, rank: int, ranks: int, rows: int = 1) -> None: ...
    def plan(
        self,
        owned: Sequence[Sequence[tuple[int, int, int]]],
        shown: Sequence[tuple[int, int, int]],
        *,
        rows: Sequence[int] = ...,
        scatters: _bool = True,
        gathers: _bool = True,
    ) -> None: ...
    memory_bytes: int  # to be read only
    room_behind: int  # to be read only
    def scratch_bytes(self, dtype: DType) -> int: ...
    def run(
        self,
        input: tuple[int, int],
        output: tuple[int, int],
        dtype: DType,
        sides: Sequence[tuple[int, int]],
        memory: tuple[int, int],
        move: Callable[[Shot, int, list[int]], tuple[int, int, list[tuple[int, int]]]],
        launch: Callable[[list[Launch]], None] | None = None,
        *,
        seed: int,
        step: int,
        divisor: int,
        found_inf: int,
        stream: int | None = None,
        scratch: tuple[int, int] = ...,
        swapped: int = 0,
    ) -> None: ...

class Parts:
    def __init__(self, parts: Sequence[tuple[int, int]]) -> None: ...

class SharedArray:  # has a buffer
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int) -> memoryview: ...
    dtype: str  # to be read only

class Request:
    buffer: Any
    def done(self) -> _bool: ...
    def wait(self, timeout: float = 0.0) -> None: ...
    def source(self) -> int: ...

class Communicator:
    timeout: float
    rank: int  # to be read only, like the next five
    size: int
    transports: list[str]
    levels: list[int]
    shares: list[int]
    def __init__(
        self, store: Store | None, rank: int, size: int, options: CommunicatorOptions
    ) -> None: ...
    def describe(self) -> str: ...
    def explain(
        self, op: str, bytes: int, pieces: Pieces | None = None, dtype: DType = ...
    ) -> str: ...
    def allocate(self, numel: int, dtype: DType) -> SharedArray: ...
    def trace(self) -> dict[str, Any]: ...
    def wire_bytes(self) -> int: ...
    def sent_bytes(self) -> int: ...
    def run(
        self,
        op: str,
        input: int | Parts,
        out: int | Parts,
        numel: int,
        dtype: DType,
        redop: ReduceOp = ...,
        root: int = -1,
        factor: float = 1.0,
        timeout: float = 0.0,
        /,
    ) -> None: ...
    def run_coded(
        self,
        op: str,
        input: int,
        out: int,
        pieces: Pieces,
        *,
        average: _bool = True,
        seed: int = 0,
        step: int = 0,
        dtype: DType = ...,
        timeout: float = 0.0,
    ) -> _bool: ...
    def send(
        self, data: int, bytes: int, dst: int, tag: int = 0, keep: object = None
    ) -> Request: ...
    def recv(
        self, data: int, bytes: int, src: int, tag: int = 0, keep: object = None
    ) -> Request: ...
    def abort(self, reason: str) -> None: ...
