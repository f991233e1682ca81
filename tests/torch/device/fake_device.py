"""Simulated device "fakegpu": compiles fake_device.cpp once, and registers it with torch."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import include_paths, library_paths

from pycomm._C import Launch
from pycomm.codecs import implementations
from tests.codecs.cuda import emulated
from tests.compiling import GENERATED, compile_cpp
from tests.torch.harness import equal
from tests.torch.interpreter import ROOT, with_entry_point
from tests.torch.pool import OfRank, Pool, on_ranks

NAME = "fakegpu"
GROUP = "cpu:pycomm,fakegpu:pycomm"
SOURCE = Path(__file__).with_suffix(".cpp")


class Kernels(implementations.Native):
    """The codecs' CUDA kernels on the device, as `pycomm.codecs.cuda.nvrtc` launches them."""

    def launch(self, launches: list[Launch], device: torch.device) -> None:
        run = ctypes.cast(emulated.all_kernels().run, ctypes.c_void_p).value
        for each in launches:
            argument = torch.frombuffer(bytearray(each.params), dtype=torch.uint8)
            torch.ops.fakegpu.launch(run, each.kernel, each.blocks, argument)


@contextlib.contextmanager
def launched() -> Iterator[list[str]]:
    """Collect the names of the kernels that are launched meanwhile."""
    names: list[str] = []
    launch = Kernels.launch

    def noted(self: Kernels, launches: list[Launch], device: torch.device) -> None:
        names.extend(each.kernel for each in launches)
        launch(self, launches, device)

    with patch.object(Kernels, "launch", noted):
        yield names


def built() -> Path:
    """Return the library, compiled in half a minute if its source or torch has changed."""
    stamp = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = GENERATED / f"fake_device-{stamp}.so"
    if library.exists():
        return library
    GENERATED.mkdir(parents=True, exist_ok=True)
    with open(GENERATED / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".partial")
            abi = int(torch.compiled_with_cxx11_abi())
            folders = (f"-isystem{path}" for path in include_paths())
            link = ("-shared", *(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10")
            flags = ("-std=c++20", "-O1", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}")
            compile_cpp(SOURCE, partial, *flags, *folders, link=link)
            partial.rename(library)
    return library


class Graph:
    """What `torch.cuda.CUDAGraph` is on cuda."""

    def __init__(self) -> None:
        self._number = -1

    @contextlib.contextmanager
    def capture(self, stream: torch.Stream) -> Iterator[None]:
        with stream:
            torch.ops.fakegpu.begin_capture()
            try:
                yield
            finally:
                self._number = torch.ops.fakegpu.end_capture()
        if self._number < 0:
            raise RuntimeError("the stand-in does not capture operations that it runs on the host")

    def replay(self) -> None:
        torch.ops.fakegpu.replay(self._number)


def module() -> types.ModuleType:
    """Return the part of `torch.cuda` that the device has, under the same names."""
    made = types.ModuleType(f"torch.{NAME}")
    vars(made).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        current_stream=torch.accelerator.current_stream,
        get_device_name=lambda device=0: "stand-in",
        get_device_properties=lambda device: types.SimpleNamespace(L2_cache_size=4096),
        synchronize=torch.accelerator.synchronize,
        Stream=lambda priority=0: torch.Stream(NAME),
        stream=lambda stream: stream,
        Event=lambda enable_timing=False: torch.Event(NAME, enable_timing=enable_timing),
        CUDAGraph=Graph,
        graph=lambda graph, stream: graph.capture(stream),
        max_memory_allocated=lambda device=0: torch.ops.fakegpu.most_bytes(False),
        reset_peak_memory_stats=lambda device=0: torch.ops.fakegpu.most_bytes(True),
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        is_current_stream_capturing=lambda: torch.ops.fakegpu.is_capturing(),
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    return made


def autoload() -> None:
    """Load the device, as torch's entry points do for devices that are installed beside it.

    There is one, which ranks share.
    """
    load("kernels")
    torch.get_device_module(NAME).device_count = lambda: 1
    torch.ops.fakegpu.hurry()


def installed(folder: Path) -> str:
    """Return the PYTHONPATH of a Python that finds the device among its packages."""
    built()
    emulated.all_kernels()
    with_entry_point(folder, f"{NAME} = {__name__}:{autoload.__name__}")
    return f"{ROOT}{os.pathsep}{folder}"


def load(way: str) -> None:
    """Load the device into this process. A second call only changes the data path.

    Args:
        way: the data path of collectives. "held": through the host, with streams that pycomm can
            hold; "late": through the host, without; "peers": kernels work on the peers' memory;
            "kernels": as "held", with the CUDA kernels, which g++ has compiled; "both": as "peers",
            with these.
    """
    from pycomm import _build

    if not hasattr(torch, NAME):
        torch.ops.load_library(built())
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, module())
        torch.utils.generate_methods_for_privateuse1_backend()
    c10d = _build.load_c10d()
    held = way in ("held", "kernels")
    c10d.set_device_abilities(
        NAME,
        torch.ops.fakegpu.hold_address() if held else 0,
        torch.ops.fakegpu.capture_mode_address(),
        way in ("peers", "both"),
    )
    compiled = way in ("kernels", "both")
    implementations.ORDER[NAME] = ("nvrtc",) if compiled else ("reference",)
    implementations._select.cache_clear()
    if compiled:
        implementations.nvrtc = Kernels


def run(
    fakes: Pool,
    way: str,
    check: Callable[..., Any],
    *args: Any,
    group: str = GROUP,
    timeout: float = 20,
    settles: bool = False,
    **more: Any,
) -> list[Any]:
    """Run ``check(rank, ranks, *args)`` on ranks that have the device, in a group for it.

    Args:
        settles: the streams have ended before the group does.
        more: options of `Pool.run`.
    """
    how = way, group, timeout, settles
    return fakes.run(_with_device, *how, check, *args, backend=None, **more)


def same_as_cpu(
    fakes: Pool, way: str, check: Callable[..., Any], *args: Any, host: str = GROUP, **more: Any
) -> list[Any]:
    """Run ``check(rank, ranks, device, *args)`` with tensors of the CPU, and with those of the
    device; compare what each rank returns, and return it.

    Args:
        host: the group of the first run.
    """
    want = run(fakes, way, check, "cpu", *args, group=host, **more)
    got = run(fakes, way, check, NAME, *args, **more)
    for rank, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert equal(ours, theirs), f"rank {rank}"
    return got


def on_fakes(way: str = "", ranks: int = 2, **options: Any) -> Callable[[OfRank], OfRank]:
    """Make a test of a function that runs on ranks with the device, as `on_ranks` does.

    Args:
        way: the data path, unless a mark says so.
        options: of `on_ranks` and of `run`.
    """
    how = {"fixture": "fakes", "marks": ("ranks", "way", "dies"), "way": way, **options}

    def run_it(fakes: Pool, check: Callable[..., Any], *args: Any, way: str, **more: Any) -> Any:
        return run(fakes, way, check, *args, **more)

    return on_ranks(ranks, run=run_it, **how)


def _with_device(
    rank: int,
    ranks: int,
    store: dist.Store,
    way: str,
    group: str,
    timeout: float,
    settles: bool,
    check: Callable[..., Any],
    *args: Any,
) -> Any:
    load(way)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(group, store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        return check(rank, ranks, *args)
    finally:
        if settles:
            torch.accelerator.synchronize()
