"""What trainers refuse, and why: the table of which docs/combine.md is written."""

from __future__ import annotations

from pycomm.codecs import Codec


def refused_codec(trainer: str, kind: str | None, codec: Codec) -> str:
    """Return why a trainer's gradients cannot have a codec; "" if they can.

    Args:
        trainer: `Adapter.trainer`.
        kind: kind of the feedback.
        codec: the codec.
    """
    if codec.combine != "factors":
        return ""
    why = {
        "fully_shard": "averages whole matrices, and FSDP2 has shards of them at different ranks: "
        "take another codec, or HSDP, where it works on shards",
        "DeepSpeed": "has its results at the end of a step, and DeepSpeed uses those of each "
        "bucket at once: take another codec",
    }.get(trainer)
    if why is None and kind not in (None, "residual"):
        why = f"has feedback of the kind residual, not {kind}"
    return f"{codec.name} {why}" if why else ""


def refused(trainer: str, option: str) -> str:
    """Return why a trainer refuses an option; "" if it does not."""
    return _TABLE.get((trainer, option), "")


_SHARED = (
    "its ranks share the parameters (fully_shard), whose shards keep their places: shard the model "
    "anew and go on from a checkpoint, with load_checkpoint"
)
_TABLE = {
    ("fully_shard", "members"): _SHARED,
    ("HSDP", "members"): _SHARED,
    (
        "LocalSGD",
        "members",
    ): "LocalSGD keeps a start that members share: make a new LocalSGD on all "
    "ranks, which starts from the parameters of the first, and call its "
    "state.adopt_state(former.state)",
}
