"""Tries a wheel on versions of torch, where nothing can be compiled.

`make release` runs it. Each Python and torch get a virtual environment in build/smoke: PyPI's build
(CUDA, several gigabytes), unless a version says "+cpu"; it stays for the next run, and what passed
with the same wheel is not run again. A torch that cannot be installed is left out, and named. The
checks run on a PATH that has no compiler, cmake, ninja or nvcc. Those whose names begin with
"unknown" run while that torch calls itself 2.99.0, and those that begin with "kernels" with the
wheel pycomm-cuda13, if it is in dist/.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from release.torches import reason_of, wanted

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build/smoke"
TOOLS = ("env", "bash", "uname")
SECONDS = 300
UNKNOWN = "2.99.0"
FIRST_SECONDS = 3.0
"""Limit of the time from the end of `import torch` to that of the first all_reduce."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

FIRST = """
import time, torch, torch.distributed as dist
start = time.perf_counter()
dist.init_process_group("pycomm")
values = torch.full((3,), dist.get_rank() + 1)
dist.all_reduce(values)
print(f"first all_reduce after {time.perf_counter() - start:.2f} s", flush=True)
assert values.tolist() == [3, 3, 3]
dist.destroy_process_group()
"""
KERNELS = """
import torch, torch.distributed as dist
from pycomm import _C
assert _C.cuda_built()
print(_C.device_count(), "GPUs")
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libpycomm" in line}
assert [path.split("/")[-2] for path in libraries] == ["pycomm_cuda13"], libraries
dist.init_process_group("pycomm")
values = torch.full((3,), dist.get_rank() + 1)
dist.all_reduce(values)
assert values.tolist() == [3, 3, 3]
dist.destroy_process_group()
"""
CHECKPOINT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import pycomm
dist.init_process_group("pycomm")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(512, 64))
state = pycomm.compress(model, "int4")
inputs = torch.randn(8, 512)
def step():
    model.zero_grad()
    model(inputs).square().sum().backward()
    return model.module.weight.grad.clone()
step()
saved = state.state_dict()
second = step()
state.load_state_dict(saved)
assert torch.equal(step(), second), "a step after load_state_dict differs"
dist.destroy_process_group()
"""


class LeftOut(Exception):
    """A torch cannot be installed; the text says why."""


def environment(version: str, wheel: Path, interpreter: str = sys.executable) -> Path:
    """Return the interpreter of a virtual environment with that torch and the wheel.

    Args:
        version: a minor version, or an exact one such as "2.13.0" (PyPI's) or "2.13.0+cpu".
        wheel: pycomm's.
        interpreter: the Python of the wheel.

    Raises:
        LeftOut: pip does not install that torch.
    """
    folder = home(version, wheel)
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        virtualenv = [sys.executable, "-m", "virtualenv", "--quiet", "--python", interpreter]
        subprocess.run([*virtualenv, folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
        # "===": "==" would take 2.13.0+cpu for 2.13.0
        exact = version.count(".") == 2
        command = [*pip, wanted(version).replace("==", "===") if exact else wanted(version)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode and "+" in version:
            command += ["--extra-index-url", CPU_INDEX]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise LeftOut(reason_of(done))
        (folder / "complete").touch()
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--force-reinstall"]
    subprocess.run([*pip, wheel], check=True)
    return python


def home(version: str, wheel: Path) -> Path:
    """Return the folder of a torch for a wheel's Python."""
    return HOME / f"{wheel.name.split('-')[2]}-{version}"


@contextmanager
def renamed(python: Path) -> Iterator[None]:
    """Let torch call itself by a version that no wheel knows."""
    complete = python.parent.parent / "complete"
    (file,) = complete.parent.glob("lib/python*/site-packages/torch/version.py")
    text = file.read_text()
    complete.unlink()  # an environment that is left in this state is made anew
    for cached in (file.parent / "__pycache__").glob("version.*"):
        cached.unlink()
    file.write_text(re.sub(r"^__version__ = .*", f"__version__ = {UNKNOWN!r}", text, flags=re.M))
    try:
        yield
    finally:
        for cached in (file.parent / "__pycache__").glob("version.*"):
            cached.unlink()
        file.write_text(text)
        complete.touch()


@contextmanager
def kernels(python: Path) -> Iterator[None]:
    """Install the wheel with the CUDA kernels."""
    pip = [python, "-m", "pip", "--quiet"]
    (wheel,) = (ROOT / "dist").glob("pycomm_cuda13-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", wheel], check=True)
    try:
        yield
    finally:
        subprocess.run([*pip, "uninstall", "--yes", "pycomm-cuda13"], check=True)


@contextmanager
def numpy(python: Path) -> Iterator[None]:
    """Install numpy, by which torch gathers objects, as its checkpoints of several ranks do."""
    pip = [python, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", "--no-compile", "numpy"], check=True)
    try:
        yield
    finally:
        subprocess.run([*pip, "uninstall", "--yes", "numpy"], check=True)


Judge = Callable[[int, str], bool]


@dataclass(frozen=True)
class Check:
    """A command, and what its exit status and output must be."""

    command: list[str]
    passed: Judge = lambda status, _: status == 0


def doctor(status: int, text: str, expected: str) -> bool:
    """Return whether the doctor's line on `_c10d` has that text, and nothing is a problem."""
    told = re.search(rf"\b_c10d .*{expected}", text) is not None
    return told and status in (0, 3)  # 3: a warning, as of a busy machine


def soon(status: int, text: str) -> bool:
    """Return whether the first all_reduce came in time on both ranks."""
    seconds = [float(found) for found in re.findall(r"after (\d+\.\d+) s", text)]
    return status == 0 and len(seconds) == 2 and max(seconds) < FIRST_SECONDS


def reasons(status: int, text: str) -> bool:
    """Return whether the error says for which torches there is a binary, and what is missing."""
    told = ("the wheel has it for torch 2.", "there is no cmake")
    return status != 0 and all(part in text for part in told)


def checks(python: Path) -> dict[str, Check]:
    """Return all checks by their names."""
    launch = [str(python), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    examples = {
        name: [*launch, str(ROOT / f"examples/{name}.py")]
        for name in ("ddp", "fsdp2", "local_sgd", "backend", "resume")
    }
    shutil.rmtree(HOME / "saved", ignore_errors=True)
    examples["resume"] += ["--checkpoints", str(HOME / "saved")]
    examples["plan"] = [str(python), str(ROOT / "examples/plan_my_cluster.py")]
    scripts = {"first": FIRST, "checkpoint": CHECKPOINT, "kernels": KERNELS}
    for name, text in scripts.items():
        script = HOME / f"{name}.py"
        script.write_text(text)
        examples[name] = [*launch, str(script)]
    examine = [str(python), "-m", "pycomm.doctor"]
    known = {"doctor": Check(examine, partial(doctor, expected="prebuilt"))}
    known |= {name: Check(command) for name, command in examples.items()}
    known["first"] = Check(examples["first"], soon)
    loads = known.pop("kernels")
    if list((ROOT / "dist").glob("pycomm_cuda13-*.whl")):
        known |= {"kernels-load": loads, "kernels-ddp": known["ddp"]}
    return known | {"unknown-ddp": Check(examples["ddp"], reasons)}


def run(check: Check, log: Path) -> bool:
    """Run one check with its output in the file; return whether it passed."""
    bare = HOME / "bin"
    bare.mkdir(exist_ok=True)
    for tool in TOOLS:
        if not (bare / tool).exists():
            (bare / tool).symlink_to(str(shutil.which(tool)))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYCOMM_", "PYTHON", "CUDA"))}
    cache = str(HOME / "none")
    env = kept | {"PATH": str(bare), "HOME": str(HOME / "home"), "XDG_CACHE_HOME": cache}
    with open(log, "w") as file:
        done = subprocess.Popen(
            check.command, env=env, cwd=HOME, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status = done.wait(SECONDS)
        except subprocess.TimeoutExpired:
            done.kill()
            done.wait()
            return False
    return check.passed(status, log.read_text())


def try_on(version: str, wheel: Path, interpreter: str) -> list[str]:
    """Run what has not passed yet on one torch; print a line for each; return what failed.

    Raises:
        LeftOut: pip does not install that torch.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    python = environment(version, wheel, interpreter)
    version = home(version, wheel).name
    (file,) = python.parent.parent.glob("lib/python*/site-packages/torch/version.py")
    installed = re.search(r"^__version__ = '(.*)'", file.read_text(), re.MULTILINE)
    print(f"{version} is {installed[1] if installed else 'unknown'}", flush=True)
    failed = []
    for name, check in checks(python).items():
        stamp, log = (HOME / f"{version}.{name}.{end}" for end in ("passed", "log"))
        if not (stamp.exists() and stamp.read_text() == digest):
            needed = {"unknown": renamed, "kernels": kernels, "resume": numpy}
            around = needed.get(name.partition("-")[0])
            with around(python) if around else nullcontext():
                passed = run(check, log)
            if passed:
                stamp.write_text(digest)
            else:
                failed.append(f"{version} {name}")
        took = "".join(f" ({s} s)" for s in re.findall(r"after (\d+\.\d+) s", log.read_text()))
        verdict = "FAILED" if f"{version} {name}" in failed else "passed"
        print(f"{version} {name}: {verdict}{took}", flush=True)
    return failed
