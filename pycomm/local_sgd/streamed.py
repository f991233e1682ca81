"""Forms of exchange of `pycomm.LocalSGD`: `Blocking` and `Streamed`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pycomm.arguments import number, put, whole


@dataclass(frozen=True)
class Streamed:
    """Parts of the model travel one after the other, while training goes on (Streaming DiLoCo).

    An overlapped rank differs from the others between rounds; `LocalSGD.finish` makes all equal.
    One fragment with ``overlap=every`` is DiLoCo whose outer gradients come one round later.

    Args:
        fragments: number of parts of the model, of about equal size, that are averaged one after
            the other in each round: a fragment every ``every / fragments`` steps.
        overlap: local steps during which a fragment's outer gradient travels, at most
            ``every // fragments``; 0: training stops meanwhile.
        mixing: share of a rank's own parameters that it keeps when an overlapped outer gradient is
            applied, from 0 to below 1: ``mixing * own + (1 - mixing) * common``.

    Raises:
        TypeError: an option has another type.
        ValueError: an option is out of its range.

    Example:
        >>> from pycomm.local_sgd import Streamed
        >>> stream = Streamed(fragments=6, overlap=5)
        >>> local = pycomm.LocalSGD(model, every=30, exchange=stream)  # doctest: +SKIP
    """

    fragments: int = 1
    overlap: int = 1
    mixing: float = 0.5

    def __post_init__(self) -> None:
        put(
            self,
            fragments=whole("fragments", self.fragments, 1),
            overlap=whole("overlap", self.overlap),
            mixing=number("mixing", self.mixing),
        )
        if not 0 <= self.mixing < 1:
            raise ValueError(f"mixing={self.mixing}: use a share from 0 to below 1")

    def check(self, every: int) -> None:
        """Check these options against the steps of a round.

        Raises:
            ValueError: there are more fragments or steps of overlap than a round has steps for.
        """
        if self.fragments > every:
            raise ValueError(
                f"LocalSGD: fragments={self.fragments}: use 1 to every={every}, since each takes a "
                "step of its own"
            )
        if self.overlap > every // self.fragments:
            raise ValueError(
                f"LocalSGD: overlap={self.overlap} is more than every // fragments = "
                f"{every // self.fragments}: the next fragment would be due before it came"
            )


@dataclass(frozen=True)
class Blocking(Streamed):
    """Training stops while the outer gradients of the whole model travel: DiLoCo."""

    fragments: int = field(default=1, init=False, repr=False)
    overlap: int = field(default=0, init=False, repr=False)
    mixing: float = field(default=0.0, init=False, repr=False)
