"""Data that installs with packages, as bytes: for training, and held out."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable
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


def digits() -> Corpus:
    """Return scikit-learn's images of digits, every 6th held out.

    An image is 65 bytes: 128 and the digit, then 8 x 8 pixels with 17 grey levels.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed; the extra "peers" has it.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.from_numpy(found.data).to(torch.uint8)
    labels = torch.from_numpy(found.target).to(torch.uint8)[:, None] + 128
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    images = torch.cat((labels, pixels), dim=1)[order]
    chosen = torch.arange(len(images)) % 6 == 0
    return images[~chosen].flatten(), images[chosen].flatten()


CORPORA: dict[str, Callable[[], Corpus]] = {"stdlib": standard_library, "digits": digits}
