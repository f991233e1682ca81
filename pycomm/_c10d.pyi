from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d

from pycomm._C import GroupOptions

def set_device_abilities(
    device_type: str,
    stream_hold: int = 0,
    exchange_capture_mode: int = 0,
    host_addressable: bool = False,
) -> None: ...

class Options(_distributed_c10d.Backend.Options, GroupOptions):
    """Options of a "pycomm" process group: ``init_process_group("pycomm", pg_options=...)``.

    Those of the table in docs/api/backend.md, and two of torch's process groups. (At run time
    GroupOptions is no base; the same properties are made from the same table.)
    """

    device_path: str
    enable_reconfigure: bool
    global_ranks_in_group: list[int]
    _timeout: timedelta
    def __init__(self, timeout: timedelta = ..., **options: Any) -> None: ...

class Work(_distributed_c10d.Work):
    @property
    def finite(self) -> bool: ...

def then(
    work: _distributed_c10d.Work, callback: Callable[[Any], torch.Tensor]
) -> torch.futures.Future[torch.Tensor]: ...

Pair = tuple[torch.Tensor, torch.Tensor]
Sides = Sequence[tuple[int, int]]

class Layout:
    def __init__(self, rows: int = 1, owner_residuals: bool = True) -> None: ...
    def add(
        self,
        numel: int,
        codec: str,
        tensor: int,
        *,
        kind: str = "residual",
        storage: str = "float32",
        decay: float = 0.0,
        worker: Pair | None = None,
        owner: Pair | None = None,
        momentum: Pair | None = None,
        worker_spans: Sequence[tuple[int, int]] = ...,
        owner_spans: Sequence[tuple[int, int]] = ...,
    ) -> None: ...
    @property
    def numel(self) -> int: ...
    @property
    def owner_residuals(self) -> bool: ...

class Backend(_distributed_c10d.Backend):
    def __init__(
        self,
        store: _distributed_c10d.Store,
        rank: int,
        size: int,
        options: Options,
        name: str,
        parent: Backend | None = None,
    ) -> None: ...
    @property
    def options(self) -> Options: ...
    @property
    def levels(self) -> list[int]: ...
    @property
    def shares(self) -> list[int]: ...
    @property
    def transports(self) -> list[str]: ...
    @property
    def wire_bytes(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def shutdown(self) -> None: ...
    def abort(self) -> None: ...
    def describe(self) -> str: ...
    def check(self) -> None: ...
    def trace(self) -> dict[str, Any]: ...
    def get_error(self) -> Any: ...
    def wait(self, future: torch.futures.Future[Any]) -> None: ...
    def wait_after_backward(self, future: torch.futures.Future[Any]) -> None: ...
    def handle(self) -> str: ...
    def is_gone(self, handle: str) -> bool: ...
    @property
    def formed(self) -> int: ...
    def form(self, uuid: int, handles: list[str], timeout: timedelta) -> None: ...
    def set_shape_of(self, group: _distributed_c10d.ProcessGroup) -> None: ...
    def perform_nocolor_split(self, device: object) -> None: ...
    def why_no_peers(self, device: torch.device) -> str: ...
    def most_payload_bytes(self, device: torch.device) -> int: ...
    def compressed_all_reduce(
        self,
        tensor: torch.Tensor,
        layout: Layout,
        sides: Sides,
        seed: int,
        step: int,
        average: bool = True,
    ) -> Work: ...
    def compressed_reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        layout: Layout,
        sides: Sides,
        seed: int,
        step: int,
        average: bool = True,
    ) -> Work: ...
