"""`make house`, on a small repository."""

from __future__ import annotations

import subprocess

from tests.house import report

TREE = {
    "csrc/core/option_table.h": 'OPTION("PYCOMM_LINK")\n',
    "csrc/core/env.h": "struct PYCOMM_API Env {\n};\n",
    "csrc/transports/env.h": "struct Env {\n};\n",
    "csrc/transports/shm/ring.cpp": "\n" * 7,
    "pycomm/__init__.py": '_HOMES = {"compress": "", "errors": ""}\n',
    "pycomm/env.py": '# PYCOMM_IMPL and PYCOMM_LINK\nx = "PYCOMM_IMPL"\n',
    "pycomm/run.py": "class Run:\n    pass\n",
    "pycomm/codecs/__init__.py": 'CODECS: dict = {"cast": 1, "quant": 2}\nSCHEMES = {}\n',
    "pycomm/feedback/rule.py": 'Kind = Literal["residual", "decay"]\n\n\n',
    "bench/plan.py": "def f():\n    class Run:\n        pass\n",
    "bench/results/plan.csv": "a\n" * 100,
    "docs/wire/quant.md": "# Three more words\n",
}


def test_the_report_counts_what_git_tracks(tmp_path):
    for name, text in TREE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    (tmp_path / "bench" / "untracked.py").write_text("class Run:\n    pass\n")

    table, twice = report(tmp_path).split("\n\ndefined twice or more:\n")
    rows = [line.rsplit(maxsplit=2) for line in table.splitlines() if line]
    sizes = {name: now for name, now, _ in rows if now not in ("0", "now")}
    assert sizes == {
        "csrc/core": "3",
        "csrc/transports": "9",
        "pycomm, its own files": "3",
        "pycomm/codecs": "2",
        "pycomm/step": "3",
        "pycomm/start": "2",
        "bench": "3",
        "product lines": "25",
        "tracked files": str(len(TREE)),
        "public names": "2",
        "environment variables": "2",
        "codecs": "2",
        "feedback kinds": "2",
        "words of docs": "4",
        "class names defined twice": "2",
    }
    assert twice.splitlines() == ["  Env (C++): 2", "  Run (Python): 2"]
