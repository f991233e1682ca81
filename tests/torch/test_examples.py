"""Scripts as users run them, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(*command: str, folder: Path) -> str:
    """Run a command under torchrun on two ranks and return what they print."""
    rendezvous = ["--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *rendezvous, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_ddp_example(tmp_path):
    output = launch(str(ROOT / "examples/ddp.py"), folder=tmp_path)
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "quant:bits=4" in output
    assert "norms and biases stay exact" in output


def test_backend_example(tmp_path):
    output = launch(str(ROOT / "examples/backend.py"), folder=tmp_path)
    assert "2 ranks" in output
    assert "GB/s" in output


LEAVES = """
import torch, torch.distributed as dist, pycomm.backend
dist.init_process_group("pycomm")
done = []
for _ in range(30):
    future = dist.all_reduce(torch.ones(10000), async_op=True).get_future()
    future.then(lambda f: done.append(f.value()[0][0].item()))
WAIT
"""


@pytest.mark.parametrize(
    "wait", ["", "dist.irecv(torch.ones(1), 1 - dist.get_rank()).get_future()"]
)
def test_leaving_without_goodbye_ends_well(tmp_path, wait):
    script = tmp_path / "script.py"
    script.write_text(LEAVES.replace("WAIT", wait))
    launch(str(script), folder=tmp_path)


UNMODIFIED = """
import sys, torch, torch.distributed as dist
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(100, 100))
model(torch.randn(4, 100)).sum().backward()
if dist.get_rank() == 0:
    hooks = [hook.__name__ for hook, _ in model._comm_hooks]
    print(dist.get_backend(), hooks, sys.argv[1:], __name__)
"""


@pytest.mark.parametrize(
    ("options", "hooks"), [(["--codec", "int4"], "['compress_hook']"), ([], "[]")]
)
def test_unmodified_script(tmp_path, options, hooks):
    script = tmp_path / "script.py"
    script.write_text(UNMODIFIED)
    output = launch("-m", "pycomm.run", *options, str(script), "--lr", "1", folder=tmp_path)
    assert f"pycomm {hooks} ['--lr', '1'] __main__" in output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["--codec", "int9", "x.py"], "unknown codec 'int9'"), (["x.py"], "there is no script x.py")],
)
def test_run_refuses_what_it_does_not_know(tmp_path, options, complaint):
    done = subprocess.run(
        [sys.executable, "-m", "pycomm.run", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert complaint in done.stderr
