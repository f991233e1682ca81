"""Placeholder for the compression state in a copied or loaded model."""

from __future__ import annotations

from typing import Any

from pycomm.errors import Error


class DetachedState:
    """A copied or pickled state, which has no process group.

    Process groups cannot be copied or pickled, and DDP registers no hook with the reducer of a
    copy. So a copy's gradients travel exactly until `pycomm.compress` is called on it.

    Args:
        text: the policy's text.
        saved: the state's ``state_dict()``; None: a copy within the process, which has no
            residuals.
    """

    def __init__(self, text: str, saved: dict[str, Any] | None = None) -> None:
        self.text = text
        self._saved = saved

    def __repr__(self) -> str:
        return f"DetachedState({self.text})"

    def state_dict(self) -> dict[str, Any]:
        """Return the pickled state's `state_dict`, for `load_state_dict` of another state.

        Raises:
            Error: this is a copy, which has no residuals.
        """
        if self._saved is None:
            raise Error(
                "a copy of a model has no residuals: take the state_dict() of the state that "
                "pycomm.compress has returned"
            )
        return self._saved
