"""What ranks have sent says how fast their links are, and owners' shares of exact sums follow."""

from __future__ import annotations

import re

from pycomm.bench.lab.shape import Shape
from tests.processes.labs import far_hosts, printed_by

# The ranks tell each other what they have measured after 8 and after 32 collectives. In each sum, a
# fast rank sends for one or two windows of its meter before it waits for the slow one.
JOB = """
import numpy as np, torch.distributed as dist
from pycomm.bench.links.torch_store import TorchStore
from pycomm.communicator import Communicator, Piece, Store

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
requests = TorchStore(dist.distributed_c10d._get_default_store())
group = Communicator(Store.of(requests), rank, ranks, transport="tcp", timeout=120)

def values(seed):
    return np.random.default_rng(seed).standard_normal(5 << 16).astype(np.float32)

def check(x, turn):
    expected = values(turn)
    for r in range(1, ranks):
        expected = expected + values(1000 * r + turn)
    assert x.tobytes() == expected.tobytes(), turn

def buffers(call, size):
    sent = group.wire_bytes()
    call()
    return f"{(group.wire_bytes() - sent) / size:.2f}"

x = values(1000 * rank)
group.all_reduce(x)
check(x, 0)
before = group.describe()
for calls in range(2, 34):
    if calls < 6 or 9 < calls < 14:  # a busy machine needs more of them
        group.all_reduce(values(1000 * rank))
    else:
        group.barrier()
    if "exact shares" in group.describe():
        break
x = values(1000 * rank + 2)
exact = buffers(lambda: group.all_reduce(x), x.nbytes)
check(x, 2)
piece = Piece(x.size, "quant:bits=8")
coded = buffers(lambda: group.all_reduce_coded(x, [piece]), x.size)
print(rank, "measured" in before, exact, coded, group.core.shares, group.describe(), flush=True)
dist.barrier()
group.close()
"""


def test_a_rank_that_sends_slowly_owns_little_of_later_exact_sums(tmp_path):
    """It sends less than 4/3 of a buffer, and all sums keep their bits; coded shares stay equal."""
    rates = {0: "5mbit/15mbit", 1: "15mbit", 2: "15mbit"}
    lab = far_hosts(3, "unlimited", shape=Shape(delay=0.01), node_rates=rates)
    text = printed_by(lab, JOB, tmp_path)
    lines = sorted(line for line in text.splitlines() if "round trips" in line)
    assert len(lines) == 3, text
    # The same on all ranks.
    assert len({line.partition("round trips")[2] for line in lines}) == 1, text
    shares = re.search(r", exact shares (\S+) (\S+) (\S+)$", lines[0])
    assert shares, text
    # None at all, unless a busy machine kept the other two from sending at their rates.
    slow, *others = map(float, shares.groups())
    assert slow < 0.2, text
    assert slow <= min(others), text
    for rank, line in enumerate(lines):
        assert line.startswith(f"{rank} False "), text
        assert " [] 3 ranks: " in line, text
        exact, coded = map(float, line.split()[2:4])
        share = float(shares.group(rank + 1))
        # What others own goes to them, and what this rank owns to both; frames have headers.
        assert 1 + share - 0.01 < exact < 1.1 * (1 + share), text
        assert 1.33 <= coded < 1.5, text  # and int8 has scales
