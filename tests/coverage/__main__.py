"""Coverage by lines, of Python and of C++, and what one state of the tree loses beside another.

    python -m tests.coverage run before.json [arguments of pytest]
    python -m tests.coverage lost before.json after.json

`run` builds a copy of the tree with gcov, in build/coverage, and runs the tests there: all, or
those that are named. `lost` prints the lines that were covered before and are not after, in files
that are in both; a line is the same if its text and its place among the others are. It ends 1 if
there are any. A process that is killed leaves no counts.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

from tests.compiling import library
from tests.mutants.staged import ROOT, Staged, write

BUILD = ROOT / "build" / "coverage"
PRODUCT = ("pycomm/", "bench/", "triton_kernels/", "csrc/")
FLAGS = f"--coverage -fprofile-update=atomic -O1 -include {BUILD / 'exit.h'}"
# A process that ends by _exit, as a forked one does, writes no counters. So each source includes
# this, which registers its library's, and a library that is preloaded calls what is registered.
EXIT_H = """
#pragma once
#include <dlfcn.h>
extern "C" void __gcov_dump();
namespace {
[[gnu::unused]] const bool registered_for_coverage = [] {
  void* found = dlsym(RTLD_DEFAULT, "call_before_exit");
  if (found) reinterpret_cast<void (*)(void (*)())>(found)(__gcov_dump);
  return true;
}();
}  // namespace
"""
EXIT_C = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
enum { kMost = 16 };
static void (*functions[kMost])(void);
static int count = 0;
void call_before_exit(void (*function)(void)) {
  for (int i = 0; i < count; i++) {
    if (functions[i] == function) return;
  }
  if (count < kMost) functions[count++] = function;
}
__attribute__((noreturn)) void _exit(int status) {
  for (int i = 0; i < count; i++) functions[i]();
  for (;;) syscall(SYS_exit_group, status);
}
"""
SETTINGS = """
[run]
parallel = true
sigterm = true
concurrency = thread
patch = subprocess, fork, _exit
data_file = {folder}/build/python/data
include = {folder}/pycomm/*, {folder}/bench/*, {folder}/triton_kernels/*
"""


class Covered(TypedDict):
    """A file's text, and the numbers of its lines that have run, from 1."""

    source: list[str]
    lines: list[int]


def main() -> int:
    about, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.coverage", description=about)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run", help="run tests, and write the lines that they cover")
    running.add_argument("out", type=Path)
    running.add_argument("--python", action="store_true", help="count no lines of C++")
    comparing = verbs.add_parser("lost", help="print the lines that are covered no more")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args, tests = parser.parse_known_args()
    if args.verb == "run":
        return run(args.out.absolute(), tests, cpp=not args.python)
    if tests:
        parser.error(f"unknown arguments: {' '.join(tests)}")
    return lost(*(json.loads(path.read_text()) for path in (args.before, args.after)))


def run(out: Path, tests: list[str], *, cpp: bool) -> int:
    """Run tests and write a JSON of `Covered` by file; return the status of pytest."""
    if cpp:
        write(BUILD / "exit.h", EXIT_H.encode())
        os.environ |= {"CXXFLAGS": FLAGS, "CMAKE_BUILD_TYPE": "Debug"}
        # Each library writes its own counters. Objects of a cache would not know their folder.
        os.environ |= {"LDFLAGS": "-Wl,--exclude-libs,libgcov.a", "CMAKE_CXX_COMPILER_LAUNCHER": ""}
    copy = Staged(BUILD / ("all" if cpp else "python"))
    copy.update(compiled=cpp)
    counters, data = copy.folder / "build", copy.folder / "build" / "python"
    for old in counters.rglob("*.gcda"):
        old.unlink()
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    settings = data / "settings"
    settings.write_text(SETTINGS.format(folder=copy.folder))
    environment = copy.environment({})
    if cpp:
        environment["LD_PRELOAD"] = library(EXIT_C, data)
    tool = [sys.executable, "-m", "coverage"]
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", *tests]
    tested = subprocess.run(
        [*tool, "run", f"--rcfile={settings}", *pytest], cwd=copy.folder, env=environment
    )
    covered = of_python(copy.folder, tool, settings) | (of_cpp(copy.folder) if cpp else {})
    out.write_text(json.dumps(covered))
    lines = sum(len(file["lines"]) for file in covered.values())
    print(f"{lines} lines of {len(covered)} files are covered: {out}")
    return tested.returncode


def of_python(folder: Path, tool: list[str], settings: Path) -> dict[str, Covered]:
    report = folder / "build" / "python" / "report.json"
    for step in (["combine", "--quiet"], ["json", "--quiet", "-o", str(report)]):
        subprocess.run([*tool, *step, f"--rcfile={settings}"], cwd=folder, check=True)
    files = json.loads(report.read_text())["files"]
    return collected(folder, {name: file["executed_lines"] for name, file in files.items()})


def of_cpp(folder: Path) -> dict[str, Covered]:
    gcovr = [sys.executable, "-m", "gcovr", "--root", str(folder), "--json", "--filter", "csrc/"]
    gcovr += ["--gcov-ignore-parse-errors=all", "--gcov-ignore-errors=all", str(folder / "build")]
    done = subprocess.run(gcovr, cwd=folder, check=True, stdout=subprocess.PIPE)
    lines = {
        file["file"]: [line["line_number"] for line in file["lines"] if line["count"]]
        for file in json.loads(done.stdout)["files"]
    }
    return collected(folder, lines)


def collected(folder: Path, lines: dict[str, list[int]]) -> dict[str, Covered]:
    """Return files by their names in the tree: links in the copy lead to them, too."""
    found: dict[str, Covered] = {}
    for name, numbers in lines.items():
        path = (folder / name).resolve()
        known = str(path.relative_to(folder.resolve()))
        if numbers and known.startswith(PRODUCT):
            file = found.setdefault(known, {"source": path.read_text().splitlines(), "lines": []})
            file["lines"] = sorted({*file["lines"], *numbers})
    return found


def lost(before: dict[str, Covered], after: dict[str, Covered]) -> int:
    """Print the lines that are covered before and not after; return 1 if there are any."""
    count = 0
    for name in sorted(before):
        path = ROOT / name
        if name not in after and not path.exists():
            continue  # it has gone
        old = before[name]
        new = after.get(name) or {"source": path.read_text().splitlines(), "lines": []}
        matcher = difflib.SequenceMatcher(None, old["source"], new["source"], autojunk=False)
        place = {
            block.a + i + 1: block.b + i + 1
            for block in matcher.get_matching_blocks()
            for i in range(block.size)
        }
        still = set(new["lines"])
        gone = [place[line] for line in old["lines"] if place.get(line, -1) not in {-1, *still}]
        for line in gone:
            print(f"{name}:{line}: {new['source'][line - 1].strip()}")
        count += len(gone)
    print(f"{count} lines that were covered before are not after")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
