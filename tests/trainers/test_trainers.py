"""Each trainer's example learns on pycomm what it learns on Gloo, loss by loss; or compressed.

Every example prints its losses with all their digits, and whose group moved them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.torch.interpreter import ROOT, free_port, with_entry_point

LIMIT = 280  # seconds of one run


@dataclass
class Trainer:
    """An example, and how it is brought to another backend."""

    package: str
    by_name: bool
    """its --backend is free text; else PYCOMM_TAKEOVER answers for the name that it insists on"""
    launcher: bool = True
    """torchrun starts the ranks; else the trainer does"""
    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    """the package that must be installed, if it has another name"""
    variants: tuple[str, ...] = ("",)
    """arguments of the example, which runs with each"""
    on_gloo: bool = True
    """it runs on Gloo"""
    takes_momentum: bool = False
    """its --momentum codes the momentum of the optimizer"""
    warns: tuple[tuple[str, str], ...] = ()
    """variants in which `pycomm.run --codec` cannot compress, and what it says there"""


TRAINERS = [
    Trainer("accelerate", by_name=False, takes_momentum=True),
    Trainer("transformers", by_name=False, takes_momentum=True),
    Trainer("lightning", by_name=True, takes_momentum=True),
    # Its extension for shared memory is compiled at the first run.
    Trainer(
        "deepspeed",
        by_name=True,
        environment={"DS_ACCELERATOR": "cpu", "MAX_JOBS": "1"},
        variants=("--stage 1", "--stage 2 --accumulate 2", "--stage 2 --dtype bf16"),
        warns=(
            (
                '--stage 2 --zero {"contiguous_gradients":false}',
                "gradients have no buffer. Set contiguous_gradients to true",
            ),
            ("--stage 0", "Set its stage to 1"),
            ("--stage 3 --dtype bf16", r"Use fully_shard\(model\)"),
        ),
    ),
    # CUDA is a stand-in there: the example answers for Megatron's calls of torch.cuda.
    Trainer(
        "megatron",
        by_name=True,
        needs="megatron.core",
        variants=("", "--distributed-optimizer --overlap --accumulate 2", "--bf16"),
    ),
    # CUDA is a stand-in there, too: the example lets it choose the CPU. Gloo has no PREMUL_SUM, by
    # which it reduces.
    Trainer(
        "torchtitan",
        by_name=False,
        on_gloo=False,
        environment={"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"},
    ),
    # Its interface is pycomm's own; the script has the shape of Horovod's example.
    Trainer("horovod", by_name=True, needs="sklearn"),
    Trainer("ray", by_name=True, launcher=False, environment={"RAY_USAGE_STATS_ENABLED": "0"}),
]


def train(
    trainer: Trainer, backend: str, folder: Path, words: Sequence[str]
) -> tuple[list[float], str]:
    """The losses of a run, and what moved them; `words` are arguments for the example."""
    output = output_of(trainer, backend, folder, words=words)
    groups = re.findall(r"^group (.*)$", output, re.MULTILINE)
    assert len(groups) == 1, output
    return numbers(output), groups[0]


def numbers(output: str) -> list[float]:
    """The losses of all steps, of which each has a batch of its own, and what ends the run."""
    found = re.findall(r"^loss[a-z ]* ([0-9.e-]+)$", output, re.MULTILINE)
    return [float(number) for number in found]


def output_of(
    trainer: Trainer, backend: str, folder: Path, run: str = "", words: Sequence[str] = ()
) -> str:
    """The output of both streams of all ranks; `words` are arguments for the example."""
    with_entry_point(folder)
    takeover = ""
    command = [sys.executable]
    if trainer.launcher:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / f"examples/trainers/train_{trainer.package}.py")]
    if trainer.by_name:
        command += ["--backend", backend]
    elif backend == "pycomm":
        takeover = "gloo"
    command += words
    with (folder / "output").open("w+") as output:
        started = subprocess.Popen(
            command,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
                "OMP_NUM_THREADS": "1",
                "PYCOMM_TAKEOVER": takeover,
                "PYCOMM_RUN": run,
                **trainer.environment,
            },
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = started.wait(LIMIT)
        except subprocess.TimeoutExpired:
            started.terminate()  # torchrun ends its ranks, which have sessions of their own
            with suppress(subprocess.TimeoutExpired):
                started.wait(30)
            pytest.fail(f"it takes more than {LIMIT} s: {(folder / 'output').read_text()}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
        text = (folder / "output").read_text()
        assert code == 0, text
    return text


def skip_without(trainer: Trainer) -> None:
    wanted = trainer.needs or trainer.package
    try:
        found = importlib.util.find_spec(wanted) is not None
    except ModuleNotFoundError:  # of "megatron.core", where there is no megatron
        found = False
    if not found:
        pytest.skip(f"{wanted} is not installed: make trainers")


RUNS = [(trainer, variant) for trainer in TRAINERS for variant in trainer.variants]


def name(value: Trainer | str) -> str:
    return value.package if isinstance(value, Trainer) else value.replace(" ", "") or "plain"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("trainer", "variant"),
    [r for r in [*RUNS, *((t, v) for t in TRAINERS for v, _ in t.warns)] if r[0].on_gloo],
    ids=name,
)
def test_losses_are_those_of_gloo(trainer, variant, tmp_path):
    skip_without(trainer)
    theirs, not_ours = train(trainer, "gloo", tmp_path, variant.split())
    ours, group = train(trainer, "pycomm", tmp_path, variant.split())
    assert not_ours == "not pycomm's"
    assert group.startswith("2 ranks: shm")
    assert len(ours) >= 6
    assert ours == theirs


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("trainer", "variant"),
    # Horovod's names the codec itself.
    [(trainer, variant) for trainer, variant in RUNS if trainer.package != "horovod"],
    ids=name,
)
def test_a_codec_compresses_the_gradients(trainer, variant, tmp_path):
    skip_without(trainer)
    # The rule is for the examples' layers, which are so small that they would travel exactly.
    options = "--codec int4 --rule *weight=int4"
    output = output_of(trainer, "gloo", tmp_path, options, variant.split())
    assert "policy: int4" in output
    assert "compresses nothing here" not in output
    compressed = numbers(output)
    backend = "gloo" if trainer.on_gloo else "pycomm"
    exact = numbers(output_of(trainer, backend, tmp_path, words=variant.split()))
    assert compressed != exact
    assert compressed == pytest.approx(exact, rel=0.1)  # Adam with a large rate is among them


@pytest.mark.timeout(900)
@pytest.mark.parametrize("trainer", [t for t in TRAINERS if t.takes_momentum], ids=name)
def test_the_momentum_travels_in_one_bit(trainer, tmp_path):
    """With the trainer's scheduler."""
    skip_without(trainer)
    exact = numbers(output_of(trainer, "gloo", tmp_path))
    output = output_of(trainer, "gloo", tmp_path, words=("--momentum", "sign"))
    assert "policy: sign" in output
    assert numbers(output) != exact
    assert numbers(output) == pytest.approx(exact, rel=0.3)  # six steps from the start


def test_accelerate_sees_an_overflow_of_the_coded_momentum(tmp_path):
    """Its GradScaler is for GPUs; here a wrapper that it makes gets one for the CPU."""
    skip_without(Trainer("accelerate", by_name=False))
    done = subprocess.run(
        [sys.executable, "-c", OVERFLOW, str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["skipped", "moved"]


OVERFLOW = """
import sys, torch, torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
import pycomm
Accelerator(cpu=True)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
optimizer = AcceleratedOptimizer(torch.optim.AdamW(model.parameters(), 0.1), scaler=scaler)
assert pycomm.code_optimizer(optimizer, model, "sign") is optimizer
assert isinstance(optimizer.optimizer, pycomm.CodedAdamW)
for factor in (float("inf"), 1.0):
    before = model.module.weight.detach().clone()
    scaler.scale(factor * model(torch.ones(2, 64)).square().mean()).backward()
    optimizer.step()
    assert optimizer.step_was_skipped == torch.equal(before, model.module.weight)
    print("skipped" if optimizer.step_was_skipped else "moved")
    optimizer.zero_grad()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("trainer", "variant", "why"),
    [(trainer, *one) for trainer in TRAINERS for one in trainer.warns],
    ids=name,
)
def test_uncompressed_trainers_get_a_hint(trainer, variant, why, tmp_path):
    skip_without(trainer)
    output = output_of(trainer, "gloo", tmp_path, "--codec int4", variant.split())
    warnings = re.findall("--codec compresses nothing here: (.*)", output)
    assert len(warnings) == 1, output
    assert re.search(why, warnings[0]), output
    assert "policy: int4" not in output


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "variant"),
    [
        ("deepspeed", "--stage 1"),
        ("deepspeed", "--stage 2"),
        ("megatron", ""),
        ("megatron", "--distributed-optimizer --overlap"),
        ("torchtitan", ""),
    ],
)
def test_the_exact_codec_changes_no_loss(package, variant, tmp_path):
    """Both divide by two ranks, which is exact before the sum and after it."""
    trainer = next(t for t in TRAINERS if t.package == package)
    skip_without(trainer)
    backend = "gloo" if trainer.on_gloo else "pycomm"
    theirs, _ = train(trainer, backend, tmp_path, variant.split())
    if trainer.by_name:
        ours, _ = train(trainer, backend, tmp_path, [*variant.split(), "--codec", "fp32"])
    else:
        ours = numbers(output_of(trainer, "gloo", tmp_path, "--codec fp32"))
    assert len(ours) >= 6
    assert ours == theirs


def test_the_script_for_horovod_learns_with_four_bits(tmp_path):
    trainer = next(t for t in TRAINERS if t.package == "horovod")
    skip_without(trainer)
    words = ("--codec", "int4", "--epochs", "10")
    output = output_of(trainer, "pycomm", tmp_path, words=words)
    assert "policy: int4" in output
    (accuracy,) = re.findall(r"^accuracy ([0-9.]+)$", output, re.MULTILINE)
    assert float(accuracy) > 0.8  # ten classes; a guess is right once in ten times


def workers_of_tensorflow(folder: Path, codec: str) -> list[str]:
    """The output of each of two workers, which TF_CONFIG describes."""
    workers = [f"127.0.0.1:{free_port()}", "127.0.0.1:1"]
    script = ROOT / "examples/trainers/train_tensorflow.py"
    started = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        started.append(
            subprocess.Popen(
                [sys.executable, str(script), "--codec", codec],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "TF_CONFIG": json.dumps(config),
                    "TF_NUM_INTRAOP_THREADS": "1",
                    "PYCOMM_TRANSPORT": "tcp",  # whose bytes are counted
                },
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [worker.communicate(timeout=LIMIT)[0] for worker in started]
    finally:
        for worker in started:
            worker.kill()
    assert [worker.returncode for worker in started] == [0, 0], "\n".join(outputs)
    return outputs


@pytest.mark.timeout(600)
def test_tensorflow_averages_exact_and_coded(tmp_path):
    skip_without(Trainer("tensorflow", by_name=False))
    losses, sizes = {}, {}
    for codec in ("none", "int8", "int4"):
        outputs = workers_of_tensorflow(tmp_path, codec)
        ends = [re.findall(r"^parameters (\w+), torch (\w+)$", o, re.MULTILINE) for o in outputs]
        assert ends[0] == ends[1]  # to the bit
        assert ends[0][0][1] == "False"  # torch is not loaded
        losses[codec] = numbers(outputs[0])
        sizes[codec] = int(re.search(r"^(\d+) bytes", outputs[0], re.MULTILINE)[1])
    exact = losses["none"]
    assert len(exact) == 7
    assert exact[5] < 0.3 * exact[0]  # the last is of digits that were held out
    for codec in ("int8", "int4"):
        assert losses[codec] != exact
        assert losses[codec] == pytest.approx(exact, rel=0.1, abs=0.1)
    assert sizes["none"] > 3 * sizes["int8"] > 5 * sizes["int4"] > 0
