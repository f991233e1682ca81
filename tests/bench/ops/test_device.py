"""`python -m pycomm.bench OP --device cuda`: what of it needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.bench.__main__ import main
from pycomm.bench.ops.operations import OPERATIONS, make_case
from pycomm.bench.ops.torch_backends import Torch, coded_run


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("argv", [["all_reduce"], ["all_gather", "--backend", "nccl"]])
def test_cuda_without_a_gpu_is_one_line(argv, capsys):
    assert main([*argv, "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "a torch that was built for CUDA" in said


def test_backends_of_the_other_device_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["all_reduce", "--backend", "nccl"])
    assert "--backend nccl is not for --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("name", [n for n in OPERATIONS if n != "sendrecv"])  # with itself
@pytest.mark.parametrize("place", ["in", "out"])
def test_tensors_lie_in_and_out_of_place(alone, name, place):
    """Of a group of one rank, on the CPU in place of a GPU."""
    backend = Torch("pycomm-torch", alone)
    case = make_case(OPERATIONS[name], 256, dtype="float32", redop="sum", rank=0, ranks=1)
    case = replace(case, place=place if case.op.in_part else "")
    x, y = backend.buffers(case)
    run = backend.prepare(case, x, y)
    backend.fill(x, case.stored(case.inputs(0)))
    run()
    assert (backend.stored(case, y) == case.expected()).all()


def test_payloads_of_another_backend_are_coded_alike(alone):
    of = {"dtype": "float32", "redop": "avg", "rank": 0, "ranks": 1}
    case = make_case(OPERATIONS["reduce_scatter"], 4096, **of)
    x, y = torch.linspace(-1, 1, case.count), torch.zeros(case.count)
    coded_run(alone, case, x, y, "int8")()
    codec = pycomm.codec("int8")
    assert torch.equal(y, codec.decode(codec.encode(x), case.count))
