"""Checks of a saved state against the model that loads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pycomm.log import logger
from pycomm.policy.names import few, matching

Entries = Mapping[str, Mapping[str, Any]]
"""Residuals by parameter name, as `Residuals.state_dict` returns them."""


def residuals_of(saved: Mapping[str, Any], key: str, step: int) -> Entries:
    """Return the residuals that one rank has saved.

    Args:
        saved: the loaded state.
        key: key of that rank's entry.
        step: step of the whole state.

    Raises:
        ValueError: the entry is of another step, for example because a loader filled a new state's
            `state_dict` and left out the residuals.
    """
    then, residuals = saved[key]
    if then != step:
        raise ValueError(
            f"the hook's state is of step {step}, and its entry {key} of step {then}: the "
            "residuals were not loaded with the rest. Load the entry as a whole, or use "
            "state.load_checkpoint(folder)"
        )
    entries: Entries = residuals
    return entries


def known(states: Sequence[Entries], here: Collection[str], *, tell: bool) -> list[Entries]:
    """Return residuals by the parameters' names here, without those of unknown parameters.

    Args:
        states: residuals of some ranks.
        here: names of all parameters; empty if they are not known yet.
        tell: warn about unknown parameters; set on one rank of a group.
    """
    if not here:
        return list(states)
    saved = dict.fromkeys(name for state in states for name in state)
    names = matching(saved, here)
    lost = [name for name in saved if name not in names]
    if lost and tell:
        logger.warning(
            "the state has residuals of parameters that this model does not have, and drops them: "
            "%s. Names here are %s",
            few(lost),
            few(here),
        )
    return [{names[n]: entry for n, entry in state.items() if n in names} for state in states]


def check_sizes(saved: Entries, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Check that parameters have the sizes of the saved residuals.

    Args:
        saved: residuals by name here.
        sizes: rows and values per row of this rank's part of each parameter, by name.

    Raises:
        ValueError: sizes differ; the text names the parameters.
    """
    wrong = []
    for name in saved.keys() & sizes.keys():
        numel, rows, *_ = saved[name]["about"]
        if (rows, numel) != sizes[name]:
            wrong.append(
                f"{name} had {rows} x {numel} values and has {' x '.join(map(str, sizes[name]))}"
            )
    if wrong:
        raise ValueError(f"the hook's state belongs to another model: {few(sorted(wrong))}")
