"""The places where torch asks for a backend's name or class, through torch's public functions.

Found by a search of torch/distributed for ProcessGroupGloo, ProcessGroupNCCL, Backend.GLOO,
Backend.NCCL, get_backend() and name(). Each works on a group of pycomm, or is refused in a
sentence. Other files test more: operations (test_ops.py), groups made of groups (test_groups.py).
At the end: `_c10d` is found if it fits torch, else compiled once.
"""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import _build, backend
from pycomm.errors import Error
from tests.torch.harness import check_sum, integers
from tests.torch.interpreter import ROOT, run
from tests.torch.pool import on_ranks

CPU = torch.device("cpu")


# ------------------------------------------------------------------ timeouts


@on_ranks(2)
def test_set_pg_timeout_holds_for_later_operations(rank, size):
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's is that nothing was set
        # torch 2.14 has a public function, and warns of the other one.
        getattr(dist, "set_timeout", c10d._set_pg_timeout)(timedelta(seconds=1), group)
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(pycomm.Error):
            dist.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - begin < 15  # of the 20 s that the group was made with
        c10d._get_default_store().set("tried", "")
    else:
        c10d._get_default_store().wait(["tried"])


# ------------------------------------------------------------------ groups


@on_ranks(2)
def test_monitored_barrier_serves_gloo_too(rank, size):
    """torch's own function serves other groups."""
    dist.monitored_barrier(dist.new_group(backend="gloo"))


@on_ranks(2)
def test_each_dimension_of_a_mesh_has_its_backend(rank, size):
    override = {"a": ("pycomm", pycomm.Options(transport="tcp")), "b": "gloo"}
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"), backend_override=override)
    assert "tcp" in backend.find(mesh.get_group("a")).describe()  # type: ignore[union-attr]
    assert backend.find(mesh.get_group("b")) is None
    check_sum(mesh.get_group("a"))


# ------------------------------------------------------------------ operations


@on_ranks(2)
def test_gradients_flow_through_collectives(rank, size):
    """Gradients of all_gather and all_to_all, where torch has ways around Gloo and NCCL."""
    from torch.distributed.nn import functional

    x = torch.full((2,), rank + 1.0, requires_grad=True)
    sum(part.sum() for part in functional.all_gather(x)).backward()
    assert x.grad.tolist() == [size] * 2
    given = [torch.full((2,), float(rank), requires_grad=True) for _ in range(size)]
    taken = functional.all_to_all([torch.zeros(2) for _ in range(size)], given)
    assert [part[0].item() for part in taken] == [0.0, 1.0]
    (2 * torch.stack(list(taken)).sum()).backward()
    assert all(part.grad is not None and part.grad.tolist() == [2.0] * 2 for part in given)


def resizing_hook(state, bucket):  # DDP would compare annotations with the types
    """Make the bucket larger for a while, as torch's batched_powerSGD_hook does."""
    buffer = bucket.buffer()
    numel = buffer.numel()
    buffer.resize_(numel + 1000)[numel:].fill_(0)
    buffer.resize_(numel)
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


@on_ranks(2)
def test_hooks_of_torch_reduce_alike(rank, size):
    """Hooks of torch in several buckets, of which one makes them larger."""
    hooks = (
        (None, default_hooks.fp16_compress_hook),
        (powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.powerSGD_hook),
        (None, resizing_hook),
    )
    for state, hook in hooks:
        layers = nn.Sequential(nn.Linear(9, 70), nn.Linear(70, 300))
        net, buckets = DistributedDataParallel(layers, bucket_cap_mb=0.02), set()

        def counted(state, bucket, hook=hook, buckets=buckets):
            buckets.add(bucket.index())
            return hook(state, bucket)

        net.register_comm_hook(state, counted)
        for _ in range(4):
            net(torch.full((2, 9), rank + 1.0)).sum().backward()
        gradients = torch.cat([p.grad.reshape(-1) for p in net.parameters()])  # type: ignore[union-attr]
        everybody = [torch.zeros_like(gradients) for _ in range(size)]
        dist.all_gather(everybody, gradients)
        assert len(buckets) > 1
        assert torch.equal(everybody[0], everybody[1])
        assert gradients.isfinite().all()


@on_ranks(2)
def test_one_tensor_twice_gets_its_sum_twice(rank, size):
    """As on Gloo, wherever the tensor gets the same result each time that it is in the list."""
    world: Any = dist.group.WORLD
    for group in (world, dist.new_group(backend="gloo")):
        x, y = torch.full((3,), rank + 1.0), torch.full((2,), rank + 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the function is deprecated
            dist.all_reduce_coalesced([x, y, x], group=group)
        assert (x.tolist(), y.tolist()) == ([3.0] * 3, [3.0] * 2)
    with dist._coalescing_manager(device=CPU):
        dist.all_reduce(x)
        dist.all_reduce(x)
    assert x.tolist() == [6.0] * 3
    shard, other, whole = torch.full((2,), rank + 1.0), torch.zeros(2), torch.zeros(4)
    world.allgather_into_tensor_coalesced([whole, whole], [shard, shard]).wait()
    assert whole.tolist() == [1.0, 1.0, 2.0, 2.0]
    world.reduce_scatter_tensor_coalesced([shard, shard], [whole, whole]).wait()
    assert shard.tolist() == [2.0 + 2.0 * rank] * 2
    with pytest.raises(pycomm.Error, match="two results would have one place"):
        world.allgather_into_tensor_coalesced([whole, whole], [shard, other])
    with pytest.raises(pycomm.Error, match="two results would have one place"):
        backend.find().allgather_coalesced([[whole[:2], whole[:2]]] * 2, [shard, other])
    check_sum()


# -------------------------------------------------------------------------------------- newer torch
# What torch 2.14 asks of a backend: names without warnings.


TORCH = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))

# A process in which nothing has imported pycomm: torch finds the backend by its entry point.
QUIET = """
import warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
dist.init_process_group({name!r}, store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group(backend="pycomm")
x, all = torch.ones(4), torch.ones(4)
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
for g in (None, group):
    dist.all_reduce(x, group=g)
    gather(all, x, group=g)
    scatter(x, all, group=g)
    dist.all_to_all_single(all, x, group=g)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["pycomm", "cpu:pycomm", "cpu:pycomm,cuda:pycomm"])
def test_torch_has_nothing_to_warn_of(installed, name):
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = run("-c", QUIET.format(name=name), variables={"PYTHONPATH": path}, autoload=True)
    assert done.returncode == 0, done.stderr
    if TORCH >= (2, 14):  # older versions warn in C++ of devices named one by one
        assert "Warning" not in done.stderr


# -------------------------------------------------------------------------------------------- traps
# Pitfalls of torch.distributed for third-party backends.


@on_ranks(2)
def test_one_backend_serves_both_devices(rank, size):
    """Torch has one slot for all backends that it does not know."""
    group = dist.group.WORLD
    assert group._get_backend(CPU) is group._get_backend(torch.device("cuda"))


@on_ranks(2, backend=None)
def test_detailed_debugging_allows_compression(rank, size, store):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
        wrapper: Any = dist.group.WORLD._get_backend(CPU)
        assert type(wrapper).__name__ == "_ProcessGroupWrapper"
        assert backend.find() is wrapper.wrapped_pg
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(64, 64))
        pycomm.compress(model, "int8")
        model(torch.ones(1, 64)).sum().backward()
        x, y = integers(rank, 7), torch.zeros(7)
        dist.all_reduce(x)
        assert torch.equal(x, sum(integers(r, 7) for r in range(size)))
        ops = [
            dist.P2POp(dist.irecv, y, 1 - rank),
            dist.P2POp(dist.isend, integers(rank, 7), 1 - rank),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(y, integers(1 - rank, 7))
        dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def shared(t: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory that is mapped as shared."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, flags = line.split()[:2]
            begin, end = (int(a, 16) for a in addresses.split("-"))
            if begin <= t.data_ptr() < end:
                return flags.endswith("s")
    return False


@on_ranks(2)
def test_fsdp2_takes_its_buffers_from_us(rank, size):
    """This excludes set_custom_all_gather, by torch's own rule."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    buffers = []
    original = collectives.ProcessGroupAllocMixin.allocate

    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        buffers.append(original(*args, **kwargs))
        return buffers[-1]

    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        collectives.ProcessGroupAllocMixin.allocate = allocate
        try:
            for layer in (model[0], model[2]):
                layer.set_allocate_memory_from_process_group_for_comm(ours)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                model(integers(rank + step, 4, 64)).square().sum().backward()
                optimizer.step()
        finally:
            collectives.ProcessGroupAllocMixin.allocate = original
        results.append([p.to_local().clone() for p in model.parameters()])
        if ours:
            assert len(buffers) >= 3 * 4  # two layers, forward and backward
            assert all(shared(b) for b in buffers)
            count = len(buffers)
    assert len(buffers) == count
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@on_ranks(2)
def test_tensors_in_shared_memory(rank, size):
    native = backend.find()
    assert native.supports_tensor_alloc(CPU)
    assert not native.supports_tensor_alloc(torch.device("cuda:0"))
    for dtype, value in ((torch.bfloat16, 1), (torch.complex64, 1 + 2j)):
        x = native.allocate_tensor(1000, dtype=dtype, device=CPU)
        assert (x.shape, x.dtype) == ((1000,), dtype)
        assert shared(x)
        x.fill_(value)
        dist.all_reduce(x)
        assert x.tolist() == [size * value] * 1000
    assert native.allocate_tensor(0, dtype=torch.float32, device=CPU).numel() == 0


@on_ranks(2)
def test_ddp_takes_its_buckets_from_us(rank, size):
    """The all-reduce of a bucket then copies nothing."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(512, 512), gradient_as_bucket_view=True)
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        model.zero_grad()
        model(integers(rank, 4, 512)).sum().backward()
        assert all(shared(p.grad) for p in model.parameters())


# ------------------------------------------------------------------------------------------- _c10d
# It is found if it fits torch, else compiled once; failures are explained.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return the folder of an installed package with sources; _c10d is not loaded yet."""
    folder = tmp_path / "pycomm"
    (folder / "csrc/binding/torch").mkdir(parents=True)
    (folder / "csrc/binding/torch/backend.cpp").write_text("source")
    (folder / "csrc/binding/module.map").write_text("exports")
    (folder / "CMakeLists.txt").write_text("flags")
    monkeypatch.setattr(_build, "PACKAGE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "pycomm._c10d", raising=False)
    monkeypatch.setattr(_build, "import_c10d", lambda binary: binary)
    return folder


@pytest.fixture
def compiled(monkeypatch):
    """Replace the compiler; return the list of folders in which it was called."""
    folders = []

    def compile_into(folder: Path) -> None:
        folders.append(folder)
        time.sleep(0.2)  # long enough for the other ranks to request it too
        (folder / _build.BINARY).touch()

    monkeypatch.setattr(_build, "_compile", compile_into)
    return folders


def test_ranks_that_ask_together_compile_once(package, compiled, monkeypatch):
    monkeypatch.setattr(_build, "_loading", nullcontext())  # the threads stand for processes
    with ThreadPoolExecutor(4) as ranks:
        found = set(ranks.map(lambda _: _build.load_c10d(), range(4)))
    assert len(compiled) == 1
    assert len(found) == 1
    assert _build.load_c10d() in found
    assert len(compiled) == 1


def test_threads_that_ask_together_load_once(package, compiled, monkeypatch):
    loads = []

    def load(binary: Path) -> Path:
        loads.append(binary)
        time.sleep(0.1)
        monkeypatch.setitem(sys.modules, "pycomm._c10d", ModuleType("pycomm._c10d"))
        return binary

    monkeypatch.setattr(_build, "import_c10d", load)
    (package / "_c10d.torch").write_text(torch.__version__ + "\n")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: _build.load_c10d(), range(4)))
    assert len(loads) == 1


@pytest.mark.parametrize("file", ["torch/backend.cpp", "module.map"])
def test_changed_sources_are_compiled_again(package, compiled, file):
    first = _build.load_c10d()
    (package / "csrc/binding" / file).write_text("another")
    assert _build.load_c10d() != first
    assert len(compiled) == 2


@pytest.fixture
def prebuilt(package):
    """Put the prebuilt binaries of a wheel into the package."""

    def put(*minors: str) -> None:
        for minor in minors:
            folder = package / "_prebuilt" / minor
            folder.mkdir(parents=True)
            (folder / _build.BINARY).touch()

    return put


VERSION = torch.__version__


@pytest.mark.parametrize(
    ("stamp", "minors", "version", "kind", "said"),
    [
        (VERSION, (), VERSION, "installed", []),
        ("1.0", (), VERSION, "compiled", ["torch 1.0", VERSION]),
        ("", ("2.13", "2.9"), "2.16.0", "compiled", ["the wheel has it for torch 2.9, 2.13"]),
        *(
            ("", ("2.1", "2.13", "2.14"), version, "prebuilt", [])
            for version in ("2.14.0", "2.14.9+cu130", "2.14.0a0+git1234")
        ),
    ],
)
def test_a_binary_that_fits_is_taken_and_else_compiled(
    package, prebuilt, compiled, monkeypatch, caplog, stamp, minors, version, kind, said
):
    (package / "_c10d.torch").write_text(f"{stamp}\n")
    prebuilt(*minors)
    monkeypatch.setattr(torch, "__version__", version)
    found = _build.load_c10d()
    assert _build.find_c10d(version) == (kind, found)
    delivered = {"installed": package, "prebuilt": package / "_prebuilt/2.14"}
    assert found.parent == (compiled[0] if kind == "compiled" else delivered[kind])
    assert len(compiled) == (kind == "compiled")
    assert all(text in caplog.text for text in said)


@pytest.mark.parametrize("kind", ["installed", "prebuilt"])
def test_a_delivered_binary_that_does_not_load_is_replaced(
    package, prebuilt, compiled, monkeypatch, caplog, kind
):
    if kind == "prebuilt":
        prebuilt("2.14")
    else:
        (package / "_c10d.torch").write_text("2.14.0\n")
    monkeypatch.setattr(torch, "__version__", "2.14.0")

    def load(binary: Path) -> Path:
        if "cache" not in binary.parts:
            raise ImportError("undefined symbol: x")
        return binary

    monkeypatch.setattr(_build, "import_c10d", load)
    assert _build.load_c10d().parent == compiled[0]
    assert f"the {kind} one does not load: undefined symbol: x" in caplog.text


def test_a_compiled_binary_that_does_not_load_is_named(package, compiled, monkeypatch):
    _build.load_c10d()

    def load(binary: Path) -> Path:
        raise ImportError("file too short")

    monkeypatch.setattr(_build, "import_c10d", load)
    with pytest.raises(Error, match="does not load: file too short; remove that file"):
        _build.load_c10d()
    assert len(compiled) == 1


def test_two_torches_compile_in_turn(package, monkeypatch):
    running, most = [], []

    def compile_into(folder: Path) -> None:
        running.append(folder)
        most.append(len(running))
        time.sleep(0.1)
        (folder / _build.BINARY).touch()
        running.remove(folder)

    monkeypatch.setattr(_build, "_compile", compile_into)

    def build(version: str) -> None:
        folder = _build._folder_of(version)
        _build._prepare(folder)
        with _build._locked(folder.parent):
            _build._compile_aloud(folder, version, "none")

    with ThreadPoolExecutor(2) as processes:
        list(processes.map(build, ["2.14.0", "2.15.0"]))
    assert most == [1, 1]


@pytest.mark.parametrize("part", ["home", "folder", "binary"])
def test_what_others_can_write_is_not_loaded(package, compiled, monkeypatch, part):
    """Whoever can write into the cache could run code in every rank."""
    planted = _build.load_c10d()
    assert package.parent / "cache/pycomm" in planted.parents
    compiled.clear()
    parts = {"home": planted.parents[1], "folder": planted.parent, "binary": planted}
    parts[part].chmod(0o777)
    assert _build.find_c10d(torch.__version__) is None
    with pytest.raises(Error, match=re.escape(f"{parts[part]} can be written by other users")):
        _build.load_c10d()
    assert compiled == []
    parts[part].chmod(0o755)
    assert _build.load_c10d() == planted


def test_a_torch_too_old_is_refused(package, compiled, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(Error, match=r"torch 2\.10\.1 is too old for pycomm: install torch 2\.11"):
        _build.load_c10d()
    assert compiled == []


def test_no_writable_folder_is_an_error(package, compiled):
    (package.parent / "cache").write_text("a file, so that no folder can be made here")
    with pytest.raises(Error, match="set XDG_CACHE_HOME"):
        _build.load_c10d()


def test_failure_has_the_words_of_the_tool(package):
    (package / "CMakeLists.txt").write_text('message(FATAL_ERROR "no such flag")')
    with pytest.raises(Error, match="no such flag"):
        _build.load_c10d()


def test_missing_tool_is_named_with_a_remedy(package, monkeypatch):
    monkeypatch.setattr(_build.shutil, "which", lambda tool, path=None: None)
    with pytest.raises(Error, match=r"no cmake, no ninja.*pip install .pycomm\[compile\]"):
        _build.load_c10d()


def test_no_rank_sees_a_binary_that_is_still_being_written(package, monkeypatch):
    folder, seen = package.parent / "cache", []
    folder.mkdir()

    def run(command: list[str]) -> None:
        if "--build" in command:
            Path(command[-1], _build.BINARY).write_text("the binary")

    def copy(source: Path, to: Path) -> None:
        Path(to).write_text("half")
        seen.append((folder / _build.BINARY).exists())
        Path(to).write_text(Path(source).read_text())

    monkeypatch.setattr(_build, "missing_tools", list)
    monkeypatch.setattr(_build, "_run", run)
    monkeypatch.setattr(_build.shutil, "copy", copy)
    _build._compile(folder)
    assert seen == [False]
    assert (folder / _build.BINARY).read_text() == "the binary"


FUTURE = """
import torch
torch.__version__ = "2.99.0"
import torch.distributed as dist, pycomm.backend
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_unknown_torch_without_a_compiler_is_an_error_with_all_reasons(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYCOMM_")}
    env |= {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = run("-c", FUTURE, env=env, cwd=tmp_path)
    assert done.returncode != 0
    for text in ("there is no _c10d for torch 2.99.0: found one for torch ", "there is no ", "c++"):
        assert text in done.stderr
