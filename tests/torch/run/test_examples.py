"""Example scripts; one is run under torchrun, as users do, the others with its variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch import torchrun
from tests.torch.interpreter import launch

ROOT = Path(__file__).parents[3]


def test_ddp_example(tmp_path):
    output = torchrun.launch(str(ROOT / "examples/ddp.py"), folder=tmp_path, fresh=True)
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "quant:bits=4" in output
    assert "norms and biases stay exact" in output


@pytest.mark.parametrize("name", ["fsdp2", "local_sgd"])
def test_other_examples_of_training(tmp_path, name):
    output = launch(str(ROOT / f"examples/{name}.py"), folder=tmp_path)
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "quant:bits=4" in output
    assert ("ranks met 6 times" if name == "local_sgd" else "weights: cast:") in output


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


# Both ranks' operations are under way before one rank leaves, since none can start afterwards.
UNANSWERED = "dist.irecv(torch.ones(1), 1 - dist.get_rank()).get_future(); dist.barrier()"


@pytest.mark.parametrize("wait", ["", UNANSWERED], ids=["all_done", "unanswered_receive"])
def test_leaving_without_goodbye_ends_well(tmp_path, wait):
    script = tmp_path / "script.py"
    script.write_text(LEAVES.replace("WAIT", wait))
    launch(str(script), folder=tmp_path)
