"""Sparse all-reduce of the backend in Python: csrc/binding/torch/backend.cpp in Python."""

from __future__ import annotations

import torch

from pycomm import _C
from pycomm.backend.python.tensors import elements, flat, parts
from pycomm.errors import WireMismatch


def sum_over_ranks(core: _C.Communicator, tensor: torch.Tensor, seconds: float) -> None:
    """Replace a sparse COO tensor by its sum over all ranks, each of which has its own indices.

    Raises:
        WireMismatch: a rank's tensor has another shape, or other sparse dimensions.
    """
    with torch.inference_mode():
        mine = tensor.detach().coalesce()
        own = [mine._nnz(), mine.sparse_dim(), *mine.shape]
        header = torch.tensor(own, dtype=torch.int64, device="cpu")
        headers = torch.empty(core.size, len(own), dtype=torch.int64, device="cpu")
        core.all_gather(header.data_ptr(), headers.data_ptr(), len(own), _C.DType.int64, seconds)
        entries = []
        for rank, (count, *rest) in enumerate(headers.tolist()):
            entries.append(count)
            if rest != own[1:]:
                raise WireMismatch(
                    f"rank {core.rank}: sparse all_reduce: its tensor has another shape, or other "
                    f"sparse dimensions, than that of rank {rank}"
                )
        indices = _gather_uneven(core, mine._indices(), 1, entries, seconds)
        values = _gather_uneven(core, mine._values(), 0, entries, seconds)
        # All ranks have the same entries in the same order, so the sums have the same bits.
        total = torch.sparse_coo_tensor(
            torch.cat(indices, 1), torch.cat(values, 0), tensor.shape, check_invariants=False
        )
        tensor.copy_(total.coalesce())


def _gather_uneven(
    core: _C.Communicator, mine: torch.Tensor, dim: int, lengths: list[int], seconds: float
) -> list[torch.Tensor]:
    """Gather tensors that differ between ranks in the length of one dimension only."""
    theirs = []
    for length in lengths:
        shape = list(mine.shape)
        shape[dim] = length
        theirs.append(torch.empty(shape, dtype=mine.dtype, device="cpu"))
    data = flat(mine)
    core.all_gather(data.data_ptr(), parts(theirs), elements(mine)[0], seconds)
    return theirs
