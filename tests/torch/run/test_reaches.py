"""`pycomm.run --codec` compresses a script's gradients, or explains why not and what to write."""

from __future__ import annotations

import pytest

from pycomm.hooks import unreached
from tests.torch.interpreter import launch

OPTIONS = ["-m", "pycomm.run", "--codec", "int4"]

# All names under which torch 2.13 exports the functions that shard or replicate, and keywords.
REACHED = """
import torch, torch.distributed as dist
from torch.distributed._composable.fsdp import fully_shard as composable
from torch.distributed._composable.replicate import replicate as replicate_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import fully_shard as private
from pycomm import monitor
dist.init_process_group("gloo")
makers = [fully_shard, private, composable, replicate_fsdp, replicate_ddp,
          lambda net: fully_shard(module=net)]
kept = []
for number, make in enumerate(makers, start=1):
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model = make(net)
    model(torch.ones(2, 64)).sum().backward()
    kept.append(model)
    assert len(monitor.snapshot()) == number, (number, monitor.text())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    optimizer.step()
if dist.get_rank() == 0:
    print("ALL", len(makers), flush=True)
dist.destroy_process_group()
"""


def test_what_shards_is_compressed_by_whatever_name_it_was_imported(tmp_path):
    (tmp_path / "script.py").write_text(REACHED)
    output = launch(*OPTIONS, "script.py", folder=tmp_path)
    assert "ALL 6" in output
    assert "compresses nothing" not in output


UNREACHED = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
kind = sys.argv[1]
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
if kind == "lightning":
    import lightning.strategies
    model = lightning.strategies.wrap(model)
if kind == "fsdp1":
    inner = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    model = FullyShardedDataParallel(
        torch.nn.Sequential(inner, torch.nn.Linear(64, 64)),
        device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(10):
    model(torch.ones(2, 64)).sum().backward()
    if kind == "own":
        for p in model.parameters():
            dist.all_reduce(p.grad)
    if kind == "deepspeed":
        import deepspeed.engine
        deepspeed.engine.step(optimizer)
    else:
        optimizer.step()
dist.destroy_process_group()
"""


STAND_INS = [
    ("deepspeed", "engine.py", "def step(optimizer):\n    optimizer.step()\n"),
    (
        "lightning",
        "strategies.py",
        "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "def wrap(model):\n    return FSDP(model, device_id=torch.device('cpu'))\n",
    ),
]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("fsdp1", "fully_shard(model)"),
        ("own", "model = DistributedDataParallel(model) in place of its all-reduces"),
        ("deepspeed", "Instead of deepspeed.initialize write model = Dist"),
        ("lightning", "Trainer(strategy=ModelParallelStrategy())"),
    ],
)
def test_what_no_hook_reaches_is_told_once_with_the_line_to_write(tmp_path, kind, line):
    (tmp_path / "script.py").write_text(UNREACHED)
    # Stand-ins: only the names matter here. `make trainers` has the real ones.
    for package, file, text in STAND_INS:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / file).write_text(text)
    output = launch(*OPTIONS, "script.py", kind, folder=tmp_path)
    assert output.count("--codec compresses nothing here") == 1
    assert line in output


ALONE = """
import torch
import pycomm
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(10):
    optimizer.step()
"""


def test_a_process_alone_has_nothing_to_be_told(tmp_path):
    (tmp_path / "script.py").write_text(ALONE)
    output = launch(*OPTIONS, "script.py", folder=tmp_path, ranks=1)
    assert "compresses nothing" not in output


@pytest.mark.parametrize(
    ("callers", "trainer"),
    [
        (["lightning.pytorch.strategies.fsdp", "__main__"], "lightning"),
        (["pytorch_lightning.trainer", "__main__"], "lightning"),
        (["accelerate.accelerator", "__main__"], "accelerate"),
        (["accelerate.accelerator", "transformers.trainer", "__main__"], "transformers"),
        (["torch.nn", "__main__"], ""),
        (["lightningbolt.x", "__main__"], ""),
    ],
)
def test_the_line_to_write_is_that_of_the_trainer_that_calls(callers, trainer):
    ask = unreached._trainer
    for name in callers:
        space = {"__name__": name, "inner": ask}
        exec("def call():\n    return inner()", space)
        ask = space["call"]
    assert ask() == trainer
    assert unreached.FSDP1_LINES[trainer]
    assert unreached.DEEPSPEED_LINES[trainer]
