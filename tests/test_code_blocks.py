"""Python blocks of docs run on one rank, in the order of their page, after the names that they use.

Not here: pages whose examples have tests of their own (start, policy, README), what needs other
packages (trainers: `make trainers`), GPUs (gpu) or ranks that die or join (elastic, reliability).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.torch.interpreter import ROOT, run

NAMES = """
import dataclasses
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
import pycomm
DDP = DistributedDataParallel
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
path = "saved"
batches = [torch.randn(4, 64) for _ in range(4)]
loss = lambda model, batch: model(batch).square().mean()
"""
BEFORE_EACH = "net = torch.nn.Linear(64, 64)\n"
ADAMW = "optimizer = torch.optim.AdamW(model.parameters())\n"
# What the blocks of a page take for granted.
PAGES = {
    "choosing": "",
    "feedback": "model = DDP(net)\n",
    "index": "",
    "local_sgd": f"model = net\n{ADAMW}",
    "optimizers": f"model = DDP(net)\n{ADAMW}",
    "trace": "",
}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run(page: str, tmp_path: Path):
    text = (ROOT / f"docs/{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    script = NAMES + "".join(BEFORE_EACH + PAGES[page] + block for block in blocks)
    done = run("-c", script, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
