"""`python -m pycomm.run` changes process groups and gradients, and nothing else."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest

from pycomm import run
from pycomm.hooks.construction import after_construction
from tests.extent import FULL
from tests.torch.interpreter import ROOT, Interpreter, free_port, launch, torchrun
from tests.torch.interpreter import run as run_python

UNMODIFIED = """
import sys, torch, torch.distributed as dist
from torch.distributed import init_process_group
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from pycomm import monitor
from pycomm.backend import find
init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(100, 100))
if "hook" in sys.argv:
    model.register_comm_hook(None, fp16_compress_hook)
    from torch.distributed.fsdp import fully_shard
    shards = torch.nn.Sequential(torch.nn.Linear(100, 64), torch.nn.Linear(64, 100))
    fully_shard(shards[1])
    fully_shard(shards)
    shards = torch.compile(shards, backend="aot_eager")
    for _ in range(3):
        shards(torch.ones(2, 100)).sum().backward()
    *_, report = monitor.snapshot().values()
    print("steps", report.step, [group.codec for group in report.groups])
model(torch.randn(4, 100)).sum().backward()
if dist.get_rank() == 0:
    hooks = [hook.__name__ for hook, _ in model._comm_hooks]
    print(dist.get_backend(), find() is not None, hooks, sys.argv[1:], __name__)
"""


def test_codec_compresses_what_the_script_builds(tmp_path):
    words = ["--codec", "int4", "--rule", "bias=int8", "-m", "script", "hook"]
    output = launch(
        "-m", "pycomm.run", *words, folder=tmp_path, script=UNMODIFIED, PYCOMM_LOG="info"
    )
    assert "gloo True ['compress_hook'] ['hook'] __main__" in output
    assert "policy: int4 (" in output
    assert "--rule bias" in output
    assert "the script's hook fp16_compress_hook is left out" in output
    assert "0.weight, 1.weight" in output  # within the last wrapped module
    assert "steps 3 ['int4'" in output


ASKS = """
import sys, pickle, __main__
class Local: pass
print(sys.argv, sys.path[0], __name__, __file__, __package__, type(__spec__), __doc__)
print(type(pickle.loads(pickle.dumps(Local()))) is Local, vars(__main__) is globals())
def end():
    END
end()
"""


@pytest.mark.parametrize(
    ("form", "end"),
    [
        ("script", "raise ValueError('as planned')"),
        ("script", "sys.exit(7)"),
        ("script", "1 +"),
        ("module", "raise ValueError('as planned')"),
        *([("module", "sys.exit(7)")] if FULL else []),
    ],
)
def test_a_script_runs_as_under_python(tmp_path, form, end):
    package = tmp_path / "package"
    package.mkdir()
    (package / "script.py").write_text(ASKS.replace("END", end))
    command = ["package/script.py"] if form == "script" else ["-m", "package.script"]
    command += ["--codec", "x"]
    plain = run_python(*command, cwd=tmp_path, fresh=True)
    ours = run_python("-m", "pycomm.run", "--codec", "int8", *command, cwd=tmp_path)
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode != 0
    shown = plain.stderr.removeprefix(
        "Traceback (most recent call last):\n"
    )  # our frames come first
    if form == "module":  # python shows the frames of its own runpy there
        shown = "".join(plain.stderr.splitlines(keepends=True)[-4:])
    assert ours.stderr.endswith(shown)


LATE = """
import pickle, threading
class Local: pass
def late():
    threading.main_thread().join()
    print(type(pickle.loads(pickle.dumps(Local()))) is Local)
threading.Thread(target=late).start()
"""


def test_a_thread_outlives_its_module(tmp_path):
    (tmp_path / "script.py").write_text(LATE)
    done = run_python("-m", "pycomm.run", "-m", "script", cwd=tmp_path, fresh=True)
    assert done.stdout == "True\n", done.stderr


SPAWNS = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
def rank(index, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=index, world_size=2)
    from pycomm.backend import find
    x = torch.ones(1)
    dist.all_reduce(x)
    # One write, since two ranks share the pipe.
    print(f"{x.item()} {find() is not None}\\n", end="", flush=True)
if __name__ == "__main__":
    import sys
    child = mp.spawn(rank, (sys.argv[1],), nprocs=1, join=False)
    rank(1, sys.argv[1])
    while not child.join():
        pass
"""


def test_processes_that_the_script_starts_do_the_same(tmp_path, installed):
    (tmp_path / "script.py").write_text(SPAWNS)
    command = ["-m", "pycomm.run", "script.py", str(tmp_path / "store")]
    variables = {"PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}
    done = run_python(*command, cwd=tmp_path, variables=variables)
    assert done.stdout.splitlines() == ["2.0 True"] * 2, done.stderr


@pytest.mark.parametrize(
    ("words", "options", "script"),
    [
        (
            ["--codec", "int4", "a.py", "--codec", "x"],
            ["--codec", "int4"],
            ["a.py", "--codec", "x"],
        ),
        (["--codec=int4", "-m", "a", "-m"], ["--codec=int4"], ["-m", "a", "-m"]),
        (["--codec=int4", "--", "-a.py"], ["--codec=int4"], ["-a.py"]),
        ([], [], []),
    ],
)
def test_options_end_where_the_script_begins(words, options, script):
    assert run.split(words) == (options, script)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--codec", "int9"], "unknown codec 'int9'"),
        (["--codec", "int4 error=0.1"], "error=0.1 bounds what auto chooses"),
        (["--backend", "glue"], "--backend: invalid choice: 'glue' .*pycomm.*script"),
        (["--rule", "head.*=int8"], "give a --codec"),
        (["--codec", "int4", "--rule", "int8"], "--rule takes PATTERN=CODEC, not 'int8'"),
        (["--codec", "int4", "--rule", "*=int9"], "unknown codec 'int9'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_wrong_options_are_named(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        run.apply(options)


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "there is nothing to run"), (["x.py"], "x.py'"), (["-m", "no.such"], "No module named")],
)
def test_run_refuses_what_it_cannot_run(tmp_path, words, says):
    done = run_python("-m", "pycomm.run", "--codec", "int4", *words, cwd=tmp_path)
    assert done.returncode != 0
    assert says in done.stderr.splitlines()[-1]


BY_SRUN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([1 + dist.get_rank()])
dist.all_reduce(x)
print("SUM", x.item(), "of", dist.get_world_size(), "local", os.environ["LOCAL_RANK"])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["run", "variable", "function"])
def test_ranks_that_srun_starts_find_each_other(tmp_path, way):
    call = "import pycomm\npycomm.launch_env()" if way == "function" else ""
    (tmp_path / "script.py").write_text(call + BY_SRUN)
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),  # the one that follows from the job might be taken here
        **({"PYCOMM_RUN": "--codec int4"} if way == "variable" else {}),
    }
    command = ["-m", "pycomm.run", "script.py"] if way == "run" else ["script.py"]
    tasks = [
        Interpreter(
            *command,
            variables={**step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            cwd=tmp_path,
            merged=True,
            autoload=way == "variable",
        )
        for task in range(2)
    ]
    texts = [task.communicate(60)[0] for task in tasks]
    assert [f"SUM 3 of 2 local {task}" in text for task, text in enumerate(texts)] == [True] * 2, (
        texts
    )


# -------------------------------------------------------------------------------- what is reached
# `pycomm.run --codec` compresses a script's gradients, or explains why not and what to write.


OPTIONS = ["-m", "pycomm.run", "--codec", "int4"]

# All names under which torch 2.13 exports the functions that shard or replicate, and keywords.
REACHED = """
import torch, torch.distributed as dist
from torch.distributed._composable.fsdp import fully_shard as composable
from torch.distributed._composable.replicate import replicate as replicate_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import fully_shard as private
from torch.nn.parallel import DistributedDataParallel
import pycomm
from pycomm import monitor
dist.init_process_group("gloo")
makers = [fully_shard, private, composable, replicate_fsdp, replicate_ddp,
          lambda net: fully_shard(module=net), DistributedDataParallel]
kept = []
for number, make in enumerate(makers, start=1):
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model = make(net)
    early = pycomm.state_of(model)  # before its first forward, as where a checkpoint is loaded
    model(torch.ones(2, 64)).sum().backward()
    assert early is pycomm.state_of(model) and early.residual_norms()
    kept.append(model)
    assert len(monitor.snapshot()) == number, (number, monitor.text())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    optimizer.step()
if dist.get_rank() == 0:
    print("ALL", len(makers), flush=True)
dist.destroy_process_group()
"""


def test_sharding_is_compressed_by_any_import(tmp_path):
    output = launch(*OPTIONS, "script.py", folder=tmp_path, script=REACHED)
    assert "ALL 7" in output
    assert "compresses nothing" not in output


UNREACHED = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
kind = sys.argv[1]
if kind != "alone":
    dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
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
    optimizer.step()
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["fsdp1", "own", "alone"])
def test_unreached_models_get_a_hint(tmp_path, kind):
    ranks = 1 if kind == "alone" else 2  # who has nothing to be told
    output = launch(*OPTIONS, "script.py", kind, folder=tmp_path, script=UNREACHED, ranks=ranks)
    if kind == "alone":
        assert "compresses nothing" not in output
        return
    assert output.count("--codec compresses nothing here") == 1
    assert "Write model = DistributedDataParallel(model) in place of its all-reduces" in output


# --------------------------------------------------------------------------------------- examples
# Example scripts; one is run under torchrun, as users do, the others with its variables.


def test_ddp_example(tmp_path):
    output = torchrun(str(ROOT / "examples/ddp.py"), folder=tmp_path)
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "policy: int4 (" in output
    assert "norms and biases stay exact" in output


@pytest.mark.parametrize("name", ["fsdp2", "local_sgd"])
def test_other_examples_of_training(tmp_path, name):
    output = launch(str(ROOT / f"examples/{name}.py"), folder=tmp_path)
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "policy: int4 (" in output
    assert ("ranks met 6 times" if name == "local_sgd" else "feedback: residuals take") in output


def test_backend_example(tmp_path):
    output = launch(str(ROOT / "examples/backend.py"), folder=tmp_path)
    assert "2 ranks" in output
    assert "GB/s" in output


def test_objects_of_modules_that_are_imported_later(tmp_path, monkeypatch):
    (tmp_path / "made_later.py").write_text(
        "class Made:\n    def __init__(self, x):\n        self.x = x"
    )
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    after_construction("made_later", "Made", lambda made: seen.append(made.x))
    after_construction("made_later", "Absent", seen.append)
    assert importlib.util.find_spec("made_later")  # a script may ask before it imports
    later = importlib.import_module("made_later")
    later.Made(3)
    after_construction("made_later", "Made", lambda made: seen.append(-made.x))
    later.Made(4)
    assert seen == [3, 4, -4]


SUM = """
import numpy as np
from pycomm import Communicator
with Communicator.from_env() as group:
    x = np.full(4, group.rank + 1, np.float32)
    group.all_reduce(x)
    print("sum", *x)
"""


def test_a_communicator_meets_at_the_store_of_torchrun(tmp_path):
    (tmp_path / "sum.py").write_text(SUM)
    output = torchrun("sum.py", folder=tmp_path)
    assert output.count("sum 3.0 3.0 3.0 3.0") == 2
