"""The committed inputs of the fuzz targets: `corpus.tar.xz`, with a folder for each target."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ARCHIVE = Path(__file__).parent / "corpus.tar.xz"


def read_corpus() -> dict[str, set[bytes]]:
    """Return the inputs of each target."""
    inputs: dict[str, set[bytes]] = {}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            inputs.setdefault(member.name.partition("/")[0], set()).add(file.read())
    return inputs


def write_corpus(inputs: Mapping[str, Iterable[bytes]]) -> None:
    """Write the archive. Its bytes depend on the inputs alone."""
    with tarfile.open(ARCHIVE, "w:xz", format=tarfile.USTAR_FORMAT) as archive:
        for target in sorted(inputs):
            for number, data in enumerate(sorted(set(inputs[target]))):
                member = tarfile.TarInfo(f"{target}/{number}.bin")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def unpack_corpus(folder: Path) -> None:
    """Write each input to FOLDER/TARGET/NUMBER.bin."""
    for target, inputs in read_corpus().items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(sorted(inputs)):
            (folder / target / f"{number}.bin").write_bytes(data)
