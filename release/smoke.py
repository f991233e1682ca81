"""Tries the wheel in dist/ on every minor version of torch, where nothing can be compiled.

    python -m release.smoke [2.11 2.15 ...]

`make torches` runs it. Each torch gets a virtual environment in build/smoke, with PyPI's default
build (CUDA, several gigabytes), which stays for the next run; what passed with the same wheel is
not run again. The checks run on a PATH that has no compiler, cmake, ninja or nvcc.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from release.torches import MINORS

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build/smoke"
TOOLS = ("env", "bash", "uname")
SECONDS = 300

CHECKPOINT = """
import os, tempfile, torch, torch.distributed as dist
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


def environment(minor: str, wheel: Path) -> Path:
    """Return the interpreter of a virtual environment with that torch and the wheel."""
    folder = HOME / minor
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "virtualenv", "--quiet", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
        subprocess.run([*pip, f"torch=={minor}.*", "numpy"], check=True)
        (folder / "complete").touch()
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--force-reinstall"]
    subprocess.run([*pip, wheel], check=True)
    return python


def checks(python: Path) -> dict[str, list[str]]:
    """Return the commands of all checks by their names."""
    launch = [str(python), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    examples = {
        name: [*launch, str(ROOT / f"examples/{name}.py")]
        for name in ("ddp", "fsdp2", "local_sgd", "backend")
    }
    script = HOME / "checkpoint.py"
    script.write_text(CHECKPOINT)
    doctor = [str(python), "-m", "pycomm.doctor", "--json", "-"]
    return {"doctor": doctor, **examples, "checkpoint": [*launch, str(script)]}


def passes(name: str, command: list[str], minor: str) -> bool:
    """Run one check; its output is in build/smoke/MINOR.NAME.log."""
    bare, log = HOME / "bin", HOME / f"{minor}.{name}.log"
    bare.mkdir(exist_ok=True)
    for tool in TOOLS:
        if not (bare / tool).exists():
            (bare / tool).symlink_to(str(shutil.which(tool)))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYCOMM_", "PYTHON", "CUDA"))}
    cache = str(HOME / "none")
    env = kept | {"PATH": str(bare), "HOME": str(HOME / "home"), "XDG_CACHE_HOME": cache}
    with open(log, "w") as file:
        try:
            done = subprocess.run(
                command, env=env, cwd=HOME, stdout=file, stderr=subprocess.STDOUT, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return False
    if name == "doctor":  # 3: a warning, such as of a machine that is busy
        text = log.read_text()
        findings = json.loads(text[text.index("{") : text.rindex("}") + 1])["findings"]
        (c10d,) = (f for f in findings if f["name"] == "_c10d")
        return done.returncode in (0, 3) and "prebuilt" in c10d["text"]
    return done.returncode == 0


def main(minors: list[str]) -> None:
    """Run what has not passed yet; print a line for each; exit with 1 if any failed."""
    HOME.mkdir(parents=True, exist_ok=True)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = sorted((ROOT / "dist").glob(f"pycomm-*-{tag}-{tag}-*.whl"))
    if not wheels:
        raise SystemExit("release: there is no wheel for this Python in dist/: make wheel")
    digest = hashlib.sha256(wheels[-1].read_bytes()).hexdigest()
    failed = []
    for minor in minors:
        python = environment(minor, wheels[-1])
        for name, command in checks(python).items():
            stamp = HOME / f"{minor}.{name}.passed"
            if not (stamp.exists() and stamp.read_text() == digest):
                if passes(name, command, minor):
                    stamp.write_text(digest)
                else:
                    failed.append(f"{minor} {name}")
            verdict = "FAILED" if f"{minor} {name}" in failed else "passed"
            print(f"torch {minor} {name}: {verdict}", flush=True)
    if failed:
        raise SystemExit(f"release: failed, see {HOME}/*.log: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:] or list(MINORS))
