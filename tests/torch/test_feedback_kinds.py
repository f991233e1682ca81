"""What each kind of feedback does to one tensor: in C++ and in torch, and its law."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _C, feedback
from pycomm.feedback import Feedback, Residual, storage

KINDS = ["residual:", "ema:0.8,", "momentum:0.9,", "momentum:0.9,nesterov=true,"]
RULES = [f"{kind}storage={form}" for kind in KINDS for form in storage.DTYPES]
RULES.append("ef21")
CPU = torch.device("cpu")


def gradients(steps: int, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    return torch.randn(steps, numel, generator=generator) * scales


def rule_of(text: str) -> Feedback:
    rule = Feedback.of(text)
    assert rule is not None
    return rule


def send(
    codec: pycomm.codecs.Codec, residual: Residual, x: torch.Tensor, step: int = 1
) -> torch.Tensor:
    """Encode a whole tensor with its feedback, keep the residual; return what arrives."""
    out = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8)
    feedback.encode(codec, x, out, residual, worker=True, begin=0)
    residual.commit(step)
    return codec.decode(out, x.numel())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("spec", ["int4", "topk:0.1", "fp16"])
def test_cpp_and_torch_leave_the_same_bits(text, spec):
    rule, codec, numel = rule_of(text), pycomm.codec(spec), 1000
    here = Residual(rule, numel, CPU)
    there = {role: [t.clone() for t in pair] for role, pair in here.pairs()}
    for step, x in enumerate(gradients(4, numel)):
        mine = torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8)
        theirs = torch.empty_like(mine)
        now, then = here.sides
        feedback.encode(codec, x, mine, here, worker=True, begin=0)
        nothing = (0, 0)
        address = {
            role: (pair[now].data_ptr(), pair[then].data_ptr()) for role, pair in there.items()
        }
        codec.native.encode_fed(
            x.data_ptr(),
            numel,
            theirs.data_ptr(),
            kind=_C.FeedbackKind.__members__[rule.kind],
            storage=_C.FeedbackStorage.__members__[rule.storage],
            decay=rule.decay,
            nesterov=rule.nesterov,
            error=address["worker"],
            momentum=address.get("momentum", nothing),
        )
        assert same(mine, theirs)
        for role in ("worker", "momentum"):
            if role in there:
                assert same(getattr(here, role)[then], there[role][then]), (role, step)
        here.commit(step)
