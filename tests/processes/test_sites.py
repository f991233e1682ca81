"""Hosts near each other, and far from others, are found by the round trips of their connections."""

from __future__ import annotations

import pytest

from pycomm.bench.lab.shape import Shape
from tests.extent import part
from tests.processes.labs import far_hosts, printed_by

JOB = """
import torch, torch.distributed as dist
from pycomm import backend

dist.init_process_group("pycomm")
rank = dist.get_rank()
for numel in (5, 100_003):
    x = torch.arange(float(numel)) + rank
    dist.all_reduce(x)
    assert torch.equal(x, 4 * torch.arange(float(numel)) + 6), numel
group = backend.find(dist.group.WORLD)
print(group.levels, group.describe(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


CASES = [
    ("0-2 delay=100us\n1-3 delay=100us", [0, 1, 0, 1], "; 2 sites: 0,2 | 1,3"),
    ("0-2 delay=2ms", [], " ms\n"),  # between near and far, so there are no sites
]


@pytest.mark.parametrize(("matrix", "levels", "told"), part(CASES, 2))
def test_sites_are_found_by_round_trips(tmp_path, matrix, levels, told):
    lab = far_hosts(4, "unlimited", shape=Shape(delay=0.03), matrix_text=matrix)
    text = printed_by(lab, JOB, tmp_path)
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(str(levels))]
    assert len(lines) == 4, text
    assert all("round trips up to 6" in line and told in line for line in lines), text
