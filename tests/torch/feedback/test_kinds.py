"""Kinds of feedback: their effect on one tensor, in C++ and in torch, their laws, their memory."""

from __future__ import annotations

import io
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import _C, feedback
from pycomm.feedback import Feedback, Residual, Residuals, storage
from tests.extent import each_value
from tests.torch.harness import Chosen, heard, owed, reduced
from tests.torch.pool import PATIENT, on_ranks

CPU = torch.device("cpu")


def gradients(steps: int, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    return torch.randn(steps, numel, generator=generator) * scales


def send(
    codec: pycomm.codecs.Codec, residual: Residual, x: torch.Tensor, step: int = 1
) -> torch.Tensor:
    """Encode a whole tensor with its feedback, keep the residual; return the decoded values."""
    out = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8)
    feedback.encode(codec, x, out, residual, worker=True, begin=0)
    residual.commit(step)
    return codec.decode(out, x.numel())


Addresses = tuple[int, int]


def fed_by_cpp(
    codec: pycomm.codecs.Codec, x: torch.Tensor, rule: Feedback, **addresses: Addresses
) -> torch.Tensor:
    """Return the payload of C++, which reads and writes residuals at these addresses."""
    payload = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8)
    codec.native.encode(
        x.data_ptr(),
        x.numel(),
        payload.data_ptr(),
        kind=_C.FeedbackKind.__members__[rule.kind],
        storage=_C.FeedbackStorage.__members__[rule.storage],
        decay=rule.decay,
        **addresses,
    )
    return payload


# ------------------------------------------------------------------------------- laws


def test_decay_is_sparselocos():
    """Sarfi et al. 2025, algorithm 1: ``e <- b e + x``, and what is sent is taken off."""
    codec, numel = pycomm.codec("topk:0.05,indices=int12,values=bins2"), 5000
    residual, e = Residual(Feedback.of("decay:0.5"), numel, CPU), torch.zeros(numel)
    for x in gradients(10, numel):
        arrived = send(codec, residual, x)
        e = 0.5 * e + x
        assert torch.equal(arrived, codec.decode(codec.encode(e), numel))
        e = e - arrived
        assert torch.equal(residual.current("worker"), e)
        # What feedback will add to the average of one rank.
        residuals = feedback.Residuals(Feedback.of("decay:0.5"), 1)
        residuals._residuals["p"] = residual
        assert torch.equal(residuals.added("p", 0, numel), 0.5 * e)


def test_momentum_is_dgcs_with_masking():
    codec, numel = pycomm.codec("topk:0.05"), 400
    residual = Residual(Feedback.of("momentum:0.9"), numel, CPU)
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


# ------------------------------------------------------------------------------ storage


@pytest.mark.parametrize(("form", "error"), [("float32", 0.0), ("int8", 1 / 253)])
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


@pytest.mark.parametrize("native", [True, False], ids=["C++", "torch"])
@pytest.mark.parametrize("form", storage.DTYPES)
def test_residuals_of_the_largest_values_are_finite(form, native):
    rule, codec = Feedback.of(f"residual:storage={form}"), pycomm.codec("topk:0.01")
    residual = Residual(rule, 1000, CPU)
    x = torch.full((1000,), torch.finfo(torch.float32).max)
    if native:
        pair = residual.worker[0].data_ptr(), residual.worker[1].data_ptr()
        fed_by_cpp(codec, x, rule, error=pair)
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


@pytest.mark.parametrize("rule", ["residual", "decay:0.9", "momentum:0.9"])
@pytest.mark.parametrize(("rows", "owner"), [(3, True), (1, False), (1, True)])
def test_another_layout_reads_the_last_residual(rule, rows, owner):
    """Also that of a reduce-scatter, which has no owner residual."""
    residual = feedback.Residual(Feedback.of(rule), 10, CPU, rows=rows, owner=owner)
    for step, layout in enumerate("AAABABB", 1):
        residual.use(layout, 2)
        for row in range(rows):
            assert residual.stored_worker(row).tolist() == [step - 1] * 10
            residual.stored("worker", residual.sides[1], row, 0, 10).fill_(step)
        residual.commit(step)


def test_a_residual_without_owner_moves_into_the_gradient():
    """If nodes code the sums of their ranks, another layout may give a value to another rank."""
    residual = feedback.Residual(Feedback.of("decay:0.5"), 4, CPU, owner=False)
    residual.use("here", 2, torch.zeros(4))
    residual.stored("worker", residual.sides[1], 0, 0, 4).copy_(torch.arange(4.0))
    residual.commit(1)
    gradient = torch.ones(4)
    residual.use("elsewhere", 2, gradient)
    assert gradient.tolist() == [1.0, 1.5, 2.0, 2.5]
    assert not residual.stored_worker().any()


def test_a_residual_that_is_paid_leaves_its_momentum():
    residuals = feedback.Residuals(Feedback.of("momentum:0.9,storage=float32"), 2)
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


@pytest.mark.parametrize(
    "text", ["residual", "decay:0.9,storage=int8", "momentum:0.8", "decay:0", "momentum:0"]
)
def test_text_and_rule_say_the_same(text):
    rule = Feedback.of(text)
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
        ("decay:half=1", "unknown option 'half'; feedback has the options decay, storage"),
        ("decay:decay=much", "decay='much' is not a number"),
        ("decay:1.5", "use 0 or more, and less than 1"),
        ("residual:storage=fp4", "use one of float32, int8"),
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
        ("lossless", False),
        ("lossless:bfloat16", True),
    ],
)
def test_only_contracting_codecs_keep_errors(spec, needs):
    codec = pycomm.codec(spec)
    assert Feedback.of("residual").keeps_errors(codec) is needs
    assert Feedback.of("decay").keeps_errors(codec) is needs
    # Momentum keeps more than an error.
    assert Feedback.of("momentum").keeps_errors(codec) is (spec not in ("fp32", "lossless"))


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


# ------------------------------------------------------------------------------------------- memory
# Memory of residuals: as little as training permits, and announced before its allocation.


WIDTH = 256  # a weight has 65536 values, the minimum for int8 residuals


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def held(state: pycomm.CompressionState) -> int:
    """Return the bytes written so far, since untouched pages take no memory."""
    total = 0
    for name in state.decisions:
        if name in state.residuals:
            for role, pair in state.residuals[name].pairs():
                if role == "owner" and not any(side.any() for side in pair):
                    continue  # of a codec without owners
                share = state.process_group.size() if role == "owner" else 1
                total += sum(side.numel() * side.element_size() for side in pair) // share
    return total


@on_ranks(2, **PATIENT)
@each_value
@pytest.mark.parametrize(
    ("kind", "spec", "feedback", "each"),
    [
        ("ddp", "int4", "residual", 1.5 * 2.25),
        ("ddp", "int4", "residual:storage=float32", 8 + 8 / 2),
        ("ddp", "int4", "decay:storage=int8", 1.5 * 2.25),
        ("ddp", "topk:0.01", "residual", 8),  # few values a step, for which int8 is too coarse
        ("ddp", "topk:0.01", "residual:storage=int8", 2.25),
        ("ddp", "topk:0.01", "momentum", 16),
        ("fsdp", "int4", "residual", 2.25),  # for the whole model, on each rank
        ("fsdp", "int4", "residual:storage=float32", 8),
    ],
)
def test_residuals_take_what_is_told_before(rank, size, kind, spec, feedback, each):
    model = DistributedDataParallel(network()) if kind == "ddp" else fully_shard(network())
    with heard(logging.INFO) as told:
        state = pycomm.compress(model, spec, feedback=feedback)
    assert not any(name in state.residuals for name in state.decisions)  # nothing is allocated yet
    said = [text for text in told if text.startswith("feedback: residuals take up to")]
    assert len(said) == (rank == 0)
    values = 2 * WIDTH * WIDTH
    # Biases have momentum, too.
    assert state.residual_bytes == pytest.approx(each * values, rel=5e-3)
    for step in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
    assert held(state) == state.residual_bytes
    assert "feedback: residuals take up to" in state.summary()


@on_ranks(2, **PATIENT)
def test_an_unbiased_codec_has_no_residuals(rank, size):
    with heard() as told:
        state = pycomm.compress(DistributedDataParallel(network()), "eden:bits=2")
    assert state.residual_bytes == 0
    assert not any("feedback:" in text for text in (*told, state.summary()))


def test_only_large_parameters_use_int8_storage():
    kept = {
        (kind, numel): Feedback(kind).kept(numel).storage
        for kind in ("residual", "decay", "momentum")
        for numel in (65535, 65536)
    }
    assert {which for which, storage in kept.items() if storage == "int8"} == {
        ("residual", 65536),
        ("decay", 65536),
    }
    assert Feedback.of("residual:storage=float32").kept(1 << 20).storage == "float32"
    assert Feedback().kept(1 << 20, pycomm.codec("topk:0.1")).storage == "float32"


def test_a_codec_that_needs_it_gets_a_wider_storage():
    """A schedule changes codecs, and a state may be loaded before parameters have one."""
    numel, cpu = 1 << 16, torch.device("cpu")
    int4, topk = map(pycomm.codec, ("int4", "topk:0.1"))
    residuals = Residuals(Feedback(), 1)
    residuals.get("w", numel, cpu, codec=int4)
    values = torch.randn(numel)
    for codec, form, error in ((int4, "int8", 2e-2), (topk, "float32", 0)):
        before = residuals["w"].current("worker")
        found = residuals.get("w", numel, cpu, codec=codec)
        assert found.rule.storage == form
        if codec is int4:
            storage.store(values, found.stored("worker", found.side, 0, 0, numel))
            before = values
        assert (found.current("worker") - before).abs().max() <= error
        loaded = Residuals(Feedback(), 1)
        loaded.load_state_dict(residuals.state_dict())  # before a parameter is known
        kept = loaded.get("w", numel, cpu, codec=codec)
        assert kept.rule.storage == form
        assert torch.equal(kept.current("worker"), found.current("worker"))


@on_ranks(2, **PATIENT)
@pytest.mark.parametrize(("before", "after"), [("float32", "auto"), ("auto", "float32")])
def test_checkpoints_of_another_storage_are_read(rank, size, before, after):
    states = []
    for form in (before, after):
        model = DistributedDataParallel(network())
        states.append(pycomm.compress(model, "int4", feedback=f"residual:storage={form}"))
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
        if len(states) == 1:
            model(x).square().mean().backward()
    file = io.BytesIO()
    torch.save(states[0].state_dict(), file)
    file.seek(0)
    states[1].load_state_dict(torch.load(file, weights_only=True))
    for name, norms in states[0].residual_norms().items():
        assert states[1].residual_norms()[name] == pytest.approx(norms, rel=2**-7)
    model(x).square().mean().backward()
    dist.barrier()


@on_ranks(2, **PATIENT)
def test_codecs_of_few_values_lose_nothing_by_storage(rank, size):
    """Steady gradients under a codec of few values: none of what is owed is rounded away."""
    shapes = {"weight": (WIDTH, WIDTH)}
    model = DistributedDataParallel(Chosen(shapes))
    state = pycomm.compress(model, "int4")
    gradient = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    got = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for step in range(402):
        if step == 2:
            state.set_policy("topk:0.002 guard=off")
        if step == 200:
            state.load_state_dict(state.state_dict())
        got += reduced(model, {"weight": gradient})["weight"]
    lost = 402 * gradient.double() - got - owed(state, shapes)["weight"]
    # float32 round-off of sums of 400; two steps of int4 in int8. bf16 throughout loses a quarter.
    assert lost.norm() < 1e-4 * 402 * gradient.norm()
