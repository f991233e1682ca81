"""Kinds of feedback: their effect on one tensor, in C++ and in torch, and their laws."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _C, feedback
from pycomm.feedback import Feedback, Residual, storage
from tests.extent import each_value
from tests.torch.harness import same_bits

KINDS = ["residual:", "decay:0.9,", "momentum:0.9,"]
RULES = [f"{kind}storage={form}" for kind in KINDS for form in storage.DTYPES]
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
    """Encode a whole tensor with its feedback, keep the residual; return the decoded values."""
    out = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8)
    feedback.encode(codec, x, out, residual, worker=True, begin=0)
    residual.commit(step)
    return codec.decode(out, x.numel())


@each_value
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
            storage=_C.FeedbackStorage.__members__[here.rule.storage],
            decay=rule.decay,
            error=address["worker"],
            momentum=address.get("momentum", nothing),
            scratch=_C.FeedbackScratch(),
        )
        assert same_bits(mine, theirs)
        for role in ("worker", "momentum"):
            if role in there:
                assert same_bits(getattr(here, role)[then], there[role][then]), (role, step)
        here.commit(step)


# ------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("spec", ["int8", "int4", "topk:0.01", "sign", "bf16"])
def test_what_was_sent_and_what_is_owed_are_the_sum_of_all(spec):
    codec, steps, numel = pycomm.codec(spec), 30, 3000
    residual = Residual(Feedback(), numel, CPU)
    xs = gradients(steps, numel)
    sent = sum(send(codec, residual, x).double() for x in xs)
    largest = xs.abs().amax() * steps
    lost = (sent + residual.current("worker") - xs.double().sum(0)).abs().max()
    # Each step rounds x + e and p - decode once: half a unit of the largest possible sum.
    assert lost <= 2 * steps * 2.0**-24 * largest


def test_decay_is_sparselocos():
    """Sarfi et al. 2025, algorithm 1: ``e <- b e + x``, and what is sent is taken off."""
    codec, numel = pycomm.codec("topk:0.05,indices=int12,values=bins2"), 5000
    residual, e = Residual(rule_of("decay:0.5"), numel, CPU), torch.zeros(numel)
    for x in gradients(10, numel):
        arrived = send(codec, residual, x)
        e = 0.5 * e + x
        assert torch.equal(arrived, codec.decode(codec.encode(e), numel))
        e = e - arrived
        assert torch.equal(residual.current("worker"), e)
        # What feedback will add to the average of one rank.
        residuals = feedback.Residuals(rule_of("decay:0.5"), 1)
        residuals._residuals["p"] = residual
        assert torch.equal(residuals.added("p", 0, numel), 0.5 * e)


def test_momentum_is_dgcs_with_masking():
    codec, numel = pycomm.codec("topk:0.05"), 400
    residual = Residual(rule_of("momentum:0.9"), numel, CPU)
    u, v = torch.zeros(numel), torch.zeros(numel)
    for x in gradients(20, numel):
        u = 0.9 * u + x
        v = v + u
        sent = torch.zeros(numel, dtype=torch.bool)
        sent[v.abs().topk(20).indices] = True
        arrived = send(codec, residual, x)
        assert torch.equal(arrived != 0, sent)
        # 0.9 is a float32 in C++ and a double in torch.
        torch.testing.assert_close(arrived, torch.where(sent, v, 0.0))
        u, v = torch.where(sent, 0.0, u), torch.where(sent, 0.0, v)
        assert not residual.current("momentum")[sent].any()
        assert not residual.current("worker")[sent].any()
        torch.testing.assert_close(residual.current("momentum"), u)
        torch.testing.assert_close(residual.current("worker"), v, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("form", "error"), [("float32", 0.0), ("bf16", 2.0**-8), ("int8", 1 / 253)]
)
def test_stored_values_are_close(form, error):
    values = gradients(1, 1000)[0]
    stored = storage.zeros(form, 1000, CPU)
    assert not storage.load(stored, 1000).any()
    storage.store(values, stored)
    back = storage.load(stored, 1000).clone()
    blocks = torch.nn.functional.pad(values, (0, 24)).view(-1, storage.BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[:1000]
    assert ((back - values).abs() <= error * scale).all()
    storage.scale(stored, 0.5)
    assert torch.equal(storage.load(stored, 1000), back / 2)
    part = storage.part(stored, 1000, 0, 320, 1000)
    assert torch.equal(storage.load(part, 680), back[320:] / 2)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_stored_values_are_finite(form):
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, 1.0, 0.0])
    stored = storage.zeros(form, 4, CPU)
    storage.store(values, stored)
    assert storage.load(stored, 4).isfinite().all()


@pytest.mark.parametrize("native", [True, False], ids=["C++", "torch"])
@pytest.mark.parametrize("form", storage.DTYPES)
def test_residuals_of_the_largest_values_are_finite(form, native):
    """bf16 would round them to infinity."""
    rule, codec = rule_of(f"residual:storage={form}"), pycomm.codec("topk:0.01")
    residual = Residual(rule, 1000, CPU)
    x = torch.full((1000,), torch.finfo(torch.float32).max)
    if native:
        assert residual.worker is not None
        payload = torch.empty(codec.encoded_bytes(1000), dtype=torch.uint8)
        codec.native.encode_fed(
            x.data_ptr(),
            1000,
            payload.data_ptr(),
            kind=_C.FeedbackKind.residual,
            storage=_C.FeedbackStorage.__members__[form],
            decay=rule.decay,
            error=(residual.worker[0].data_ptr(), residual.worker[1].data_ptr()),
            momentum=(0, 0),
            scratch=_C.FeedbackScratch(),
        )
        residual.commit(1)
    else:
        send(codec, residual, x)
    owed = residual.current("worker")
    assert owed.isfinite().all()
    # int8 drops blocks that are too large for its scale.
    assert owed.max() > 3e38 or form == "int8"


def test_other_owners_change_nothing_of_what_is_owed():
    residuals = feedback.Residuals(Feedback(), 3)
    residual = residuals.get("a", 100, CPU)
    for pair in (residual.worker, residual.owner):
        for side in pair:  # the other side holds values of two steps ago
            side.copy_(torch.randn(100))
    residual.use("here", 3)
    residual.commit(1)
    before, mine = residuals.added("a", 0, 100), residual.current("worker").clone()
    residual.use("elsewhere", 3)
    # The tolerance is float32 round-off of three times an owner's error and a third of that.
    torch.testing.assert_close(residuals.added("a", 0, 100), before, rtol=0, atol=1e-6)
    residual.take_back()
    assert torch.equal(residual.current("worker"), mine)
    residual.use("elsewhere", 3)
    residual.commit(7)
    assert not residual.current("owner").any()
    assert residuals.ages(9) == {"a": 2}


@pytest.mark.parametrize("rule", ["residual", "decay:0.9", "momentum:0.9"])
@pytest.mark.parametrize(("rows", "owner"), [(3, True), (1, False), (1, True)])
def test_another_layout_reads_the_last_residual(rule, rows, owner):
    """Also that of a reduce-scatter, which has no owner residual."""
    residual = feedback.Residual(rule_of(rule), 10, CPU, rows=rows, owner=owner)
    for step, layout in enumerate("AAABABB", 1):
        residual.use(layout, 2)
        for row in range(rows):
            assert residual.load_worker(row).tolist() == [step - 1] * 10
            residual.store_worker(torch.full((10,), float(step)), row)
        residual.commit(step)


def test_a_residual_without_owner_moves_into_the_gradient():
    """If nodes code the sums of their ranks, another layout may give a value to another rank."""
    residual = feedback.Residual(rule_of("decay:0.5"), 4, CPU, owner=False)
    residual.use("here", 2, torch.zeros(4))
    residual.store_worker(torch.arange(4.0))
    residual.commit(1)
    gradient = torch.ones(4)
    residual.use("elsewhere", 2, gradient)
    assert gradient.tolist() == [1.0, 1.5, 2.0, 2.5]
    assert not residual.load_worker().any()


def test_a_residual_that_is_paid_leaves_its_momentum():
    residuals = feedback.Residuals(rule_of("momentum:0.9,storage=float32"), 2)
    residual = residuals.get("a", 4, CPU)
    for pair in (residual.worker, residual.momentum):
        pair[residual.side].copy_(torch.arange(4.0))
    residuals.drop("a")
    assert residuals["a"].worker is None
    assert residuals["a"].current("momentum").tolist() == [0, 1, 2, 3]
    plain = feedback.Residuals(Feedback(), 2)
    plain.get("a", 4, CPU)
    plain.drop("a")
    assert "a" not in plain


# -------------------------------------------------------------------------------- text


@pytest.mark.parametrize("text", ["residual", "decay:0.9,storage=int8", "momentum:0.8"])
def test_text_and_rule_say_the_same(text):
    rule = rule_of(text)
    assert Feedback.of(str(rule)) == rule
    assert Feedback.of(True) == Feedback()
    assert Feedback.of(False) is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "residue",
            "unknown feedback 'residue': did you mean 'residual'. use one of residual, decay",
        ),
        ("decay:half=1", "unknown option 'half'; it has decay"),
        ("decay:decay=much", "decay='much' is not a value"),
        ("decay:1.5", "use 0 or more, and less than 1"),
        ("residual:storage=fp4", "use one of float32, bf16, int8"),
        ("residual:0.5", "has no decay"),
    ],
)
def test_wrong_texts_are_told(text, match):
    with pytest.raises(ValueError, match=match):
        Feedback.of(text)


# -------------------------------------------------------------- codecs that need feedback


@pytest.mark.parametrize(
    ("spec", "needs"),
    [
        ("int4", True),
        ("eden:bits=1,scale=mmse", True),
        ("eden:bits=1", False),
        ("fp32", False),
    ],
)
def test_only_contracting_codecs_keep_errors(spec, needs):
    codec = pycomm.codec(spec)
    assert rule_of("residual").keeps_errors(codec) is needs
    assert rule_of("decay").keeps_errors(codec) is needs
    # Momentum keeps more than an error.
    assert rule_of("momentum").keeps_errors(codec) is (spec != "fp32")


@pytest.mark.parametrize("role", ["worker", "owner"])
def test_a_step_taken_back_leaves_nothing_in_other_buckets(role):
    """What it wrote is not of the values that this rank has in the next step's bucket."""
    residual = Residual(Feedback(), 100, CPU)
    residual.use("one", 2)
    getattr(residual, role)[residual.sides[1]][:50] = 1
    residual.take_back()
    residual.use("other", 2)
    residual.commit(1)
    assert residual.current(role).count_nonzero() == 0
