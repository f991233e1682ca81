"""The "pycomm" backend by itself: torchrun --nproc-per-node 2 examples/backend.py"""

import time

import torch
import torch.distributed as dist

from pycomm import backend


def main() -> None:
    dist.init_process_group("pycomm")  # also works without the import above
    rank, size = dist.get_rank(), dist.get_world_size()

    x = torch.full((4,), float(rank))
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((4,), float(sum(range(size)))))

    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)  # runs in the background
    work.wait()

    y = torch.ones(1 << 20)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(20):
        dist.all_reduce(y, op=dist.ReduceOp.AVG)
    seconds = (time.perf_counter() - start) / 20
    group = backend.find()
    if rank == 0 and group is not None:
        print(group.describe())
        print(f"all_reduce of 4 MiB: {y.nbytes / seconds / 1e9:.2f} GB/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
