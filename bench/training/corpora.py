"""Text that installs with Python, as bytes: for training, and held out."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch

Corpus = tuple[torch.Tensor, torch.Tensor]
"""Bytes (uint8) for training, and bytes that are held out."""


def standard_library(limit: int = 8 << 20) -> Corpus:
    """Return Python's own sources as bytes (uint8): for training, and every 16th file held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Tests and tables that repeat each other are excluded: they would leak held-out text.
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    skipped |= {"encodings", "pydoc_data"}
    paths = [p for p in sorted(root.rglob("*.py")) if not set(p.relative_to(root).parts) & skipped]
    paths = [p for p in paths if not p.name.startswith("_sysconfigdata")]
    random.Random(0).shuffle(paths)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for i, path in enumerate(paths):
        text = path.read_bytes()
        parts[i % 16 == 0].append(text)
        size += len(text)
        if size > limit:
            break
    train, held_out = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts)
    return train, held_out
