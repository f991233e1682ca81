"""Libraries to link against instead of the system's: binaries then run with glibc 2.28 and newer.

    python -m release.link_stubs FOLDER

writes for libc, libm and libstdc++ a library without code that offers, under the real one's name,
the symbols and versions that its release in manylinux_2_28 had: a program that is linked against
it cannot come to need a newer one. What g++ 12 uses beyond them comes from static code in the
binary itself: `compat.cpp`, and the C++ library's own archive (Red Hat's toolsets do the same
with libstdc++_nonshared.a). No other file of the system is replaced, and no code is changed.

In glibc before 2.34, threads and dlopen had libraries of their own. Their old versions are symbols
of libc here; the loader looks for a symbol and its version in all libraries, whichever file is
named with it, and the real libraries are loaded, since binaries name them, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
# The newest versions in manylinux_2_28: glibc 2.28, and libstdc++ of gcc 8.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
EMPTY = ("libpthread.so.0", "libdl.so.2", "librt.so.1")


@dataclass(frozen=True)
class Symbol:
    """One version of a symbol that a library offers."""

    name: str
    kind: str
    """FUNC, OBJECT or TLS."""
    size: int
    version: str
    """Such as "GLIBC_2.2.5"; empty: none."""


def number(version: str) -> tuple[int, ...] | None:
    """Return the digits of a version such as "GLIBC_2.34"; None for others (GLIBC_PRIVATE)."""
    digits = version.partition("_")[2].split(".")
    return tuple(map(int, digits)) if all(d.isdigit() for d in digits) else None


def old_enough(version: str) -> bool:
    """Return whether manylinux_2_28 has this version."""
    newest, digits = NEWEST.get(version.partition("_")[0]), number(version)
    return newest is not None and digits is not None and digits <= newest


def parse(listing: str) -> Iterator[Symbol]:
    """Yield the symbols in the output of `readelf --dyn-syms --wide`."""
    row = re.compile(
        r"\s*\d+: [0-9a-f]+ +(\w+) (\w+) +(GLOBAL|WEAK|UNIQUE) +\w+ +(?:\[.*?\] +)?(\w+) (\S+)"
    )
    for line in listing.splitlines():
        found = row.match(line)
        if found is None or found[4] in ("UND", "ABS"):
            continue
        name, _, version = found[5].partition("@")
        kind = found[2] if found[2] in ("OBJECT", "TLS") else "FUNC"
        yield Symbol(name, kind, int(found[1], 0), version.lstrip("@"))


def chosen(symbols: Iterator[Symbol]) -> list[Symbol]:
    """Return for each name its newest version that is old enough."""
    best: dict[str, Symbol] = {}
    for symbol in symbols:
        if not old_enough(symbol.version):
            continue
        known = best.get(symbol.name)
        if known is None or (number(known.version) or ()) < (number(symbol.version) or ()):
            best[symbol.name] = symbol
    return [best[name] for name in sorted(best)]


def assembly(symbols: list[Symbol]) -> str:
    """Return assembly text that defines the symbols, each as the default version."""
    lines = []
    for index, s in enumerate(symbols):
        section = {"FUNC": ".text", "OBJECT": ".data", "TLS": '.section .tbss,"awT",@nobits'}
        kind = {"FUNC": "function", "OBJECT": "object", "TLS": "tls_object"}[s.kind]
        size = max(s.size, 1) if s.kind != "FUNC" else 1
        lines += [section[s.kind], f".globl s{index}", f".type s{index},@{kind}"]
        lines += [f"s{index}: .skip {size}", f".size s{index},{size}"]
        lines.append(f".symver s{index},{s.name}@@{s.version},remove")
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def run(*command: object) -> str:
    """Run a tool and return what it prints."""
    return subprocess.run(
        list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def file_of(name: str) -> Path:
    """Return where the compiler finds a library."""
    return Path(run("g++", f"-print-file-name={name}").strip()).resolve()


def stub(name: str, folder: Path) -> None:
    """Write a library without code in place of the system's library of that name."""
    symbols = []
    if name not in EMPTY:
        symbols = chosen(parse(run("readelf", "--dyn-syms", "--wide", file_of(name))))
        if not symbols:
            raise SystemExit(f"release: {file_of(name)} offers no symbol that is old enough")
    (folder / "stub.s").write_text(assembly(symbols))
    nodes = "".join(f"{v} {{}};\n" for v in sorted({s.version for s in symbols}))
    (folder / "stub.map").write_text(nodes)
    script = [f"-Wl,--version-script={folder / 'stub.map'}"] if symbols else []
    options = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", *script]
    run("gcc", *options, "-o", folder / name, folder / "stub.s")


def write(folder: Path) -> None:
    """Write all of them; `-L folder` then makes the linker take them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6", *EMPTY):
        stub(name, folder)
    flags = ("-O2", "-fPIC", "-fvisibility=hidden", "-c")
    run("g++", *flags, HERE / "compat.cpp", "-o", folder / "compat.o")
    (folder / "libcompat.a").unlink(missing_ok=True)
    run("ar", "crs", folder / "libcompat.a", folder / "compat.o")
    # Scripts of the linker, in place of the links that -lc, -lm and -lstdc++ would follow.
    nonshared, loader = file_of("libc_nonshared.a"), file_of("ld-linux-x86-64.so.2")
    parts = {
        "libc.so": f"libc.so.6 {' '.join(EMPTY)} libcompat.a {nonshared} AS_NEEDED({loader})",
        "libm.so": "libm.so.6",
        "libstdc++.so": f"libstdc++.so.6 {file_of('libstdc++.a')}",
    }
    for name, files in parts.items():
        (folder / name).write_text(f"/* GNU ld script */\nGROUP ( {files} )\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]).absolute())
