"""The parts of FSDP2 that compression reads, as torches of other versions have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pycomm.errors import Error
from pycomm.hooks import fsdp_seams


class Wrapped(nn.Linear):
    """A module as fully_shard leaves it, with the parts that a test gives it."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        info = SimpleNamespace(module=self, param_name="weight")
        self.parameter = SimpleNamespace(_module_info=info, sharded_param=self.weight)
        names = (*fsdp_seams._OF_GROUP, *fsdp_seams._SEAMS)
        self.group = SimpleNamespace(**dict.fromkeys(names), **{})
        self.group.fsdp_params = [self.parameter]
        self.state = SimpleNamespace(_fsdp_param_groups=[self.group])

    def _get_fsdp_state(self) -> SimpleNamespace:
        return self.state


@pytest.fixture
def wrapped(monkeypatch):
    monkeypatch.setattr(fsdp_seams, "FSDPModule", Wrapped)
    return Wrapped()


def test_the_one_group_of_torch_2_11_is_found(wrapped):
    wrapped.state = SimpleNamespace(_fsdp_param_group=wrapped.group)
    (unit,) = fsdp_seams.units(wrapped)
    assert list(unit.parameters) == ["weight"]
    wrapped.state = SimpleNamespace(_fsdp_param_group=None)  # a module without parameters
    assert list(fsdp_seams.units(wrapped)) == []


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("state", "_fsdp_param_groups"),
        ("group", "mesh_info"),
        ("group", "gradient_divide_factor"),
        ("parameter", "sharded_param"),
    ],
)
def test_a_torch_with_other_parts_is_an_error_when_compression_begins(wrapped, part, name):
    delattr(getattr(wrapped, part), name)
    missing = rf"{torch.__version__.split('+')[0]}.*has no {name.removesuffix('s')}"
    with pytest.raises(Error, match=missing):
        list(fsdp_seams.units(wrapped))


def test_results_are_not_late_where_torch_does_not_say_what_it_makes_of_them(wrapped):
    """In backward there must be no AttributeError."""
    (unit,) = fsdp_seams.units(wrapped)
    assert not unit.only_views(torch.zeros(4))
    wrapped.group._orig_dtype = torch.float32
    assert unit.only_views(torch.zeros(4))
    wrapped.parameter.sharded_grad_dtype = torch.bfloat16  # torch 2.15: of each parameter
    assert not unit.only_views(torch.zeros(4))
