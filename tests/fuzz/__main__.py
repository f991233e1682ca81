"""Builds the fuzz targets under ASan and UBSan and runs each over its corpus.

    python -m tests.fuzz --minutes 10 --seed 1
    python -m tests.fuzz --add                 new inputs for corpus.tar.xz

With clang the targets are libFuzzer's, with gcc standalone.cpp mutates the corpus. A finding ends
its target: the input is kept, and running the target on that file alone shows it again.

--add adds payloads of each codec to those of the decoders, as for a new codec; with clang also the
inputs of libFuzzer's earlier runs that reach code which no input of the archive reaches. --add
FILE... adds these inputs of findings to the one target that --target names.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

import pycomm

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ARCHIVE = HERE / "corpus.tar.xz"  # the inputs, in a folder for each target
CLANG = shutil.which("clang++") is not None
BUILD = ROOT / "build" / ("fuzz-clang" if CLANG else "fuzz-gcc")
CORPUS = BUILD / "corpus"  # the archive, unpacked
FOUND = BUILD / "found"  # what libFuzzer adds
TARGETS = ("decoders", "frames", "handshake", "messages", "rendezvous")


def build(targets: Sequence[str]) -> None:
    """Compile the targets."""
    options = ["-DPYCOMM_FUZZ=ON", "-DPYCOMM_SANITIZE=address,undefined"]
    options += ["-DPYCOMM_TORCH=OFF", "-DPYCOMM_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    if CLANG:
        options.append("-DCMAKE_CXX_COMPILER=clang++")
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    programs = [f"fuzz_{target}" for target in targets]
    subprocess.run(["cmake", "--build", str(BUILD), "--target", *programs], check=True)


def command(target: str, seconds: float, seed: int) -> list[str]:
    corpus = str(CORPUS / target)
    if not CLANG:
        return [program(target), corpus, "--seconds", str(seconds), "--seed", str(seed)]
    found = FOUND / target
    found.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={int(seconds)}", f"-seed={seed}", "-print_final_stats=1"]
    return [program(target), str(found), corpus, *limits]


def program(target: str) -> str:
    return str(BUILD / f"fuzz_{target}")


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


def specs() -> dict[int, str]:
    """Return the codecs of decoders.cpp, by the numbers by which inputs name them."""
    source = (HERE / "decoders.cpp").read_text()
    return {int(n): spec for n, spec in re.findall(r'\{(\d+), "([^"]+)"\}', source)}


def payloads() -> set[bytes]:
    """Return inputs of the decoders: of each codec payloads of 0, 1 and 300 values."""
    made = set()
    for (number, spec), numel in itertools.product(specs().items(), (0, 1, 300)):
        payload = pycomm.codec(spec).encode(torch.linspace(-1.0, 1.0, numel))
        made.add(bytes([number, numel & 255, numel >> 8, *payload.tolist()]))
    return made


def add(targets: Sequence[str], found: Sequence[str]) -> None:
    """Write the archive with new inputs."""
    inputs = read_corpus()
    for target in targets:
        folder = CORPUS / target
        if found:
            inputs.setdefault(target, set()).update(Path(file).read_bytes() for file in found)
            continue
        known = inputs.setdefault(target, set())
        new = payloads() - known if target == "decoders" else set()
        if CLANG:
            folder.mkdir(exist_ok=True)
            (FOUND / target).mkdir(parents=True, exist_ok=True)
            merge = ["-merge=1", str(folder), str(FOUND / target)]
            subprocess.run([program(target), *merge], check=True, cwd=ROOT)
            new |= {path.read_bytes() for path in folder.iterdir()} - known
        known |= new
        print(f"{target}: {len(new)} new inputs")
    write_corpus(inputs)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10, help="for all targets together (10)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (1)")
    parser.add_argument("--target", choices=TARGETS, help="this one alone")
    parser.add_argument(
        "--add", nargs="*", metavar="FILE", help="add inputs to the archive, and end"
    )
    options = parser.parse_args()
    targets = [options.target] if options.target else list(TARGETS)
    if options.add and not options.target:
        parser.error("--add FILE needs --target")
    build(targets)
    shutil.rmtree(CORPUS, ignore_errors=True)
    unpack_corpus(CORPUS)
    if options.add is not None:
        add(targets, options.add)
        return 0
    environment = dict(os.environ) | {
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
    }
    failed = 0
    for target in targets:
        seconds = options.minutes * 60 / len(targets)
        print(f"{target}:", flush=True)
        run = subprocess.run(command(target, seconds, options.seed), cwd=BUILD, env=environment)
        failed += run.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
