"""The torch-free core (csrc/binding). Buffers are addresses; sizes are in elements unless said."""

from builtins import bool as _bool
from collections.abc import Sequence
from typing import ClassVar

# -- core (bind_core.cpp)

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
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

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
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

def size_of(dtype: DType) -> int: ...
def reduce(
    dtype: DType,
    op: ReduceOp,
    inputs: Sequence[int],
    out: int,
    numel: int,
    *,
    copy: int = 0,
    factor: float = 1.0,
) -> None: ...
def check_reducible(dtype: DType, op: ReduceOp) -> None: ...
def all_finite(x: int, numel: int) -> _bool: ...
def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def random_words(seed: int, step: int, tensor: int, group: int) -> list[int]: ...
def crc32c(data: bytes, before: int = 0) -> int: ...
def crc32c_by_table(data: bytes) -> int: ...
def sha256(message: bytes) -> bytes: ...
def hmac_sha256(key: bytes, message: bytes) -> bytes: ...
def parse_rate(text: str) -> float: ...
def env() -> dict[str, str | int | float]: ...
def simd_level() -> str: ...
