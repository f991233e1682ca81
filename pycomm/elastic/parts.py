"""Parts of sharded tensors (DTensor), as members hand them over that have the same part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Key = tuple[tuple[str, ...], tuple[int, ...]]
"""Names and sizes of a mesh's dimensions, by which members know their own mesh of this kind."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, in the same memory; of other tensors the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()
    return part


def key(mesh: DeviceMesh) -> Key:
    return tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape)


def meshes(tensors: Iterable[object]) -> dict[Key, DeviceMesh]:
    """Return the meshes of those that are sharded."""
    return {key(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DTensor)}


def problem(tensor: DTensor) -> str:
    """Return why a part cannot be handed over; "": it can."""
    if all(isinstance(placement, (Shard, Replicate)) for placement in tensor.placements):
        return ""
    return f"has the placements {tensor.placements}: only Shard and Replicate can be handed over"


def describe(tensor: torch.Tensor) -> str:
    """Return which part this is, so that members with another one differ."""
    if not isinstance(tensor, DTensor):
        return ""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return f", of which this is the part {list(shape)} from {list(offset)}"


Form = tuple[Key, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Of a sharded tensor: its mesh, its placements (a dimension; -1: Replicate), shape and strides."""


def form(tensor: DTensor) -> Form:
    placements = tuple(
        placement.dim if isinstance(placement, Shard) else -1 for placement in tensor.placements
    )
    return key(tensor.device_mesh), placements, tuple(tensor.shape), tuple(tensor.stride())


def assemble(part: torch.Tensor, form: Form, known: dict[Key, DeviceMesh]) -> Any:
    """Return the sharded tensor of a part.

    Raises:
        KeyError: this rank has no such mesh.
    """
    mesh, dims, shape, stride = form
    placements: list[Placement] = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
    # DTensor.from_local() drops the part of a rank that is not in the mesh.
    meta = TensorMeta(torch.Size(shape), stride, part.dtype)
    spec = DTensorSpec(known[mesh], tuple(placements), tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
