"""A faster interpreter of Triton, which spends most of its time on other things than arithmetic.

At each call of a function within a kernel, as at the launch of the kernel, it replaces the
functions of `triton.language` by its own, though those of the launch are still in place. And for
each result it makes the type of a block anew, with its shape, number by number, though a kernel has
few of them. Here the former is done once a launch, and types and shapes are made once. The
arithmetic stays Triton's.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

_DONE = "_pycomm_made_it_faster"


def make_faster() -> None:
    """Make Triton's interpreter faster, if Triton is imported."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, _DONE):
        return
    setattr(interpreter, _DONE, True)
    _patch_once_a_launch(interpreter)
    _find_builtins_once(interpreter)
    _make_types_once(interpreter)


def _patch_once_a_launch(interpreter: Any) -> None:
    """Let calls of functions rely on what was patched since the launch of their kernel."""
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


def _find_builtins_once(interpreter: Any) -> None:
    """Keep what takes the place of a module's functions, which is the same at each launch."""
    replacements: dict[tuple[int, int], list[tuple[str, Any]]] = {}

    def replacement(member: Any, semantic: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return call

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        key = id(pkg), id(builder)
        if key not in replacements:
            semantic = interpreter.TritonSemantic(builder)
            replacements[key] = [
                (name, replacement(member, semantic))
                for name, member in inspect.getmembers(pkg)
                if interpreter.tl.core.is_builtin(member)
            ]
        for name, member in replacements[key]:
            scope.set_attr(pkg, name, member)

    interpreter._patch_builtin = patch_builtin


def _make_types_once(interpreter: Any) -> None:
    """Let equal blocks share their type and their shape, which nothing changes."""
    core: Any = interpreter.tl.core
    semantic: Any = interpreter.TritonSemantic
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast, numpy_type = semantic.broadcast_impl_value, interpreter._get_np_dtype
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}  # the attributes of a type
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # `shape` and `numel` of tensors
    numpy_types: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        dims = [s.value if isinstance(s, core.constexpr) else s for s in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", 0), *dims)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def get_np_dtype(dtype: Any) -> Any:
        name = str(dtype)
        if name not in numpy_types:
            numpy_types[name] = numpy_type(dtype)
        return numpy_types[name]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    semantic.broadcast_impl_value = broadcast_impl_value
    interpreter._get_np_dtype = get_np_dtype
