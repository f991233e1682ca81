"""A faster interpreter of Triton: a third of its time goes into patches of Triton's language.

At each call of a function within a kernel, as at the launch of the kernel, it replaces the
functions of `triton.language` by its own, though those of the launch are still in place.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

_DONE = "_pycomm_patches_once_a_launch"


def patch_once_a_launch() -> None:
    """Let calls of functions rely on what was patched since the launch of their kernel; if Triton
    is imported."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, _DONE):
        return
    patch = interpreter._patch_lang
    languages = {id(interpreter.tl), id(interpreter.tl.core)}
    launched: set[int] = set()  # what the launch that runs and its calls have patched

    @cache
    def seen_by(function: Any) -> set[int]:
        return {id(m) for m in function.__globals__.values() if inspect.ismodule(m)} & languages

    def patch_lang(function: Any) -> Any:
        seen = seen_by(function)
        if launched and seen <= launched:
            return None  # to a call, which restores nothing
        is_launch, scope = not launched, patch(function)
        launched.update(seen)
        if is_launch:
            restore = scope.restore

            def restored() -> None:
                launched.clear()
                restore()

            scope.restore = restored
        return scope

    interpreter._patch_lang = patch_lang
    setattr(interpreter, _DONE, True)
