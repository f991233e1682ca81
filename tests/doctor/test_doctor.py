"""`python -m pycomm.doctor`: what is wrong is found, says what to do, and decides the status."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pycomm
from pycomm import _C, _build, env
from pycomm.doctor import __main__ as cli
from pycomm.doctor import (
    children,
    finding,
    gpu,
    installed,
    job,
    machine,
    network,
    probe,
    self_test,
    variables,
)
from pycomm.doctor.finding import Finding
from pycomm.doctor.probe import ProbeOutcome
from tests.collectives.test_zero_copy import may_read_itself_in_a_child
from tests.torch import interpreter
from tests.torch.device import fake_device

PACKAGE = Path(pycomm.__file__).parent
CLEAN = {
    k: v
    for k, v in os.environ.items()
    if not k.startswith("PYCOMM_") and k not in ("RANK", "WORLD_SIZE")
}
WELL = {
    "core": ProbeOutcome({"simd": "x86-64-v4", "cuda": False, "gpus": 0}),
    "torch": ProbeOutcome(
        {
            "version": "2.13.0",
            "entry_point": True,
            "cuda": "",
            "gpus": 0,
            "no_effect": [],
        }
    ),
    "c10d": ProbeOutcome(
        {
            "torch": "2.13.0",
            "kind": "installed",
            "binary": "_c10d.so",
        }
    ),
    "driver": ProbeOutcome(error="libcuda.so.1: cannot open", missing=True),
    "triton": ProbeOutcome(),
    "nvrtc": ProbeOutcome(error="No module named 'cupy'", missing=True),
}


def level_of(findings, name: str) -> str:
    return finding.worst(f for f in findings if f.name == name)


def only(findings, name: str) -> Finding:
    (found,) = (f for f in findings if f.name == name)
    return found


# ------------------------------------------------------------------------------- the whole


def test_without_torch_all_else_is_examined(tmp_path):
    hidden = tmp_path / "torch.py"
    hidden.write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    env = CLEAN | {"PYTHONPATH": str(tmp_path), "PYCOMM_SOKETS": "4"}
    command = [sys.executable, "-m", "pycomm.doctor"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    said = outcome.stdout
    levels = {(name, level) for level, name in re.findall(r"^  (\w+) +(\w+) ", said, re.M)}
    assert {("torch", "PROBLEM"), ("core", "ok"), ("shm", "ok"), ("tcp", "ok")} <= levels
    assert re.search(r"WARNING +PYCOMM_SOKETS .*\n +-> .*PYCOMM_SOCKETS", said)
    assert (outcome.returncode, said.splitlines()[-1]) == (1, "1 problem, 1 warning")


@pytest.mark.parametrize(
    ("levels", "status"),
    [([], 0), (["ok", "note"], 0), (["ok", "warning"], 3), (["problem", "warning"], 1)],
)
def test_the_worst_finding_decides_the_status(monkeypatch, capsys, levels, status):
    found = [Finding("ok", "a", "first", "is there")]
    found += [Finding(level, "a", "name", "is so", "do this") for level in levels]
    monkeypatch.setattr(cli, "alone", lambda options: found)
    monkeypatch.setattr(cli, "place", lambda: (None, None, None))
    assert cli.main([]) == status
    said = capsys.readouterr().out
    assert ("-> do this" in said) == bool(levels)
    assert ("all is well" in said) == (status == 0)


# ------------------------------------------------------------------------------- installed


@pytest.fixture
def copied(tmp_path):
    """The package in another folder, without its binaries."""
    ignored = shutil.ignore_patterns("*.so", "*.torch", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "pycomm", ignore=ignored)
    for name in ("CMakeLists.txt", "csrc"):
        (tmp_path / name).symlink_to(_build.source_root() / name)
    return tmp_path / "pycomm"


def probed(name: str, package: Path, has_torch: bool = False) -> ProbeOutcome:
    """What a probe says in the copy. Without `site`, whose editable installs know the original,
    or in a process that has imported torch: there the copy comes before them."""
    options = {
        "env": CLEAN | {"PYTHONPATH": "", "HOME": str(package.parent)},
        "cwd": package.parent,
        "timeout": 100,
    }
    command = ["-m", "pycomm.doctor.probe", name]
    if has_torch:
        said = interpreter.run(*command, **options)
    else:
        command = [sys.executable, "-S", *command]
        said = subprocess.run(command, capture_output=True, text=True, **options)
    return ProbeOutcome(**json.loads(said.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("os.kill(os.getpid(), 11)", "crashed: SIGSEGV"),
        ("raise SystemExit('no such option')", "no such option"),
        ("time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_a_probe_that_fails_says_how(program, error):
    process = children.start("-c", f"import os, time; {program}", env=os.environ)
    seconds = 1.0 if "sleep" in program else 20.0
    assert probe.outcome(process, seconds, time.monotonic()) == ProbeOutcome(error=error)


OTHER = "_C.cpython-27-x86_64-linux-gnu.so"


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ("_C.cpython-27-x86_64-linux-gnu.so", r"for another Python \(_C\.cpython-27.*install it"),
        ("libpycomm.so", r"not built: there is no _C in .*Install a wheel"),
    ],
)
def test_an_import_without_the_core_says_why(copied, there, told):
    (copied / there).touch()
    for code in ("from pycomm import _C", "import pycomm; pycomm.Communicator"):
        command = [sys.executable, "-S", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, cwd=copied.parent)
        last = done.stderr.strip().splitlines()[-1]
        assert re.match("ImportError: pycomm is .*" + told, last), done.stderr


def test_a_binary_for_another_torch_is_found(copied):
    pytest.importorskip("torch")
    (copied / "_c10d.torch").write_text("1.13.1")
    found = probed("c10d", copied, has_torch=True)
    assert (found.facts["why"], found.facts["binary"]) == ("found one for torch 1.13.1", "")
    level = "problem" if found.facts["missing"] else "warning"
    c10d = only(installed.judge(WELL | {"c10d": found}), "_c10d")
    assert (c10d.level, "found one for torch 1.13.1" in c10d.text) == (level, True)
    found.facts["missing"] = ["ninja"]
    c10d = only(installed.judge(WELL | {"c10d": found}), "_c10d")
    assert (c10d.level, "no ninja" in c10d.text) == ("problem", True)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("installed", "built by the installation"), ("prebuilt", "prebuilt"), ("compiled", "/cache")],
)
def test_the_binary_in_use_is_told(kind, text):
    facts = WELL["c10d"].facts | {"kind": kind, "binary": "/cache/_c10d.so"}
    c10d = only(installed.judge(WELL | {"c10d": ProbeOutcome(facts)}), "_c10d")
    assert (c10d.level, text in c10d.text) == ("ok", True)


GPU = WELL | {
    "driver": ProbeOutcome({"error": 0, "version": 13000, "gpus": ["NVIDIA H200"] * 2}),
    "torch": ProbeOutcome(WELL["torch"].facts | {"cuda": "13.0", "gpus": 2}),
    "nvrtc": ProbeOutcome(),
}


def but(well: dict[str, ProbeOutcome], probe: str, **facts: object) -> dict[str, ProbeOutcome]:
    """Return outcomes of which one has these facts."""
    return well | {probe: ProbeOutcome(well[probe].facts | facts)}


def lacks(well: dict[str, ProbeOutcome], probe: str, error: str, missing: bool = False):
    return well | {probe: ProbeOutcome(error=error, missing=missing)}


@pytest.mark.parametrize(
    ("outcomes", "name", "level"),
    [
        (WELL, "CUDA", "note"),
        (GPU, "CUDA", "ok"),
        (GPU, "CUDA kernels", "note"),
        (but(GPU, "core", cuda=True, gpus=2), "CUDA kernels", "ok"),
        (but(GPU, "core", cuda=True, gpus=0), "CUDA kernels", "warning"),
        (lacks(lacks(GPU, "nvrtc", "-"), "triton", "-"), "CUDA kernels", "warning"),
        (GPU | {"torch": WELL["torch"]}, "CUDA", "warning"),
        (but(GPU, "torch", gpus=0), "CUDA", "problem"),
        (but(WELL, "driver", error=803, version=0, gpus=[]), "CUDA", "problem"),
        (but(WELL, "driver", error=100, version=13000, gpus=[]), "CUDA", "note"),
        (lacks(WELL, "core", "crashed: SIGILL"), "core", "problem"),
        (but(WELL, "torch", version="2.4.1"), "torch", "problem"),
        (but(WELL, "torch", entry_point=False), "entry point", "warning"),
        (lacks(WELL, "c10d", "undefined symbol: _ZN3c10"), "_c10d", "problem"),
        (lacks(WELL, "triton", "crashed: SIGSEGV"), "Triton", "warning"),
        (lacks(WELL, "nvrtc", "no libnvrtc"), "NVRTC", "warning"),
    ],
)
def test_what_is_installed_is_judged(outcomes, name, level):
    assert level_of(installed.judge(outcomes), name) == level


# ------------------------------------------------------------------------------- variables


def test_without_the_core_no_variable_is_unknown(monkeypatch):
    monkeypatch.setattr(variables, "core", dict)
    found = list(variables.judge({"PYCOMM_SOCKETS": "4", "PYCOMM_RUN": ""}, {}))
    assert level_of(found, "PYCOMM_SOCKETS") == "note"
    assert level_of(found, "PYCOMM_RUN") == "ok"


def test_the_core_says_what_is_wrong_with_a_variable():
    given = {"PYCOMM_TRANSPORT": "udp", "PYCOMM_SOCKETS": "4", "PYCOMM_SECRET": "hush"}
    for name, value in given.items():
        os.environ[name] = value
    try:
        refused = variables.refused()
        seen = env.given()
    finally:
        for name in given:
            del os.environ[name]
    assert list(refused) == ["PYCOMM_TRANSPORT"]
    found = list(variables.judge(seen, refused))
    assert level_of(found, "PYCOMM_SECRET") == "ok"
    assert level_of(found, "PYCOMM_TRANSPORT") == "problem"
    assert level_of(found, "PYCOMM_SOCKETS") == "ok"
    assert not any("hush" in f.text for f in found)


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("PYCOMM_LINK", "1gbit", "note"),
        ("PYCOMM_LINK", "20mbit/50mbit", "ok"),
        ("PYCOMM_TRANSPORT", "auto", "ok"),
        ("PYCOMM_IMPL", "triton", "problem"),
        ("PYCOMM_RUN", "--codc int4", "problem"),
        ("PYCOMM_CUDA", "OFF", "ok"),
        ("PYCOMM_NONSENSE", "1", "warning"),
    ],
)
def test_variables_are_judged(name, value, level):
    found = list(variables.judge({name: value}, {}, "no triton", ["unrecognized arguments"]))
    assert level_of(found, name) == level


# ------------------------------------------------------------------------------- machine, network


@pytest.mark.parametrize(
    ("quota", "ranks_here", "level"), [(None, 8, "ok"), (None, 9, "warning"), (1.5, 0, "warning")]
)
def test_cores_are_judged(quota, ranks_here, level):
    assert machine.judge(8, quota, ranks_here).level == level


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"a/b/cpu.max": "max 100000"}, None),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ({"cpu/a/b/cpu.cfs_quota_us": "50000", "cpu/a/b/cpu.cfs_period_us": "100000"}, 0.5),
    ],
)
def test_quotas_of_both_kinds_of_control_groups(tmp_path, files, quota):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/a\n3:cpu,cpuacct:/a/b\n0::/a/b\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.cpu_quota(tmp_path) == quota


def test_an_interface_that_does_not_exist_is_a_problem():
    found, _ = network.judge({"PYCOMM_INTERFACE": "nope0"}, 0)
    assert (found.level, "nope0" in found.text) == ("problem", True)
    assert "lo (127.0.0.1)" in found.advice


def test_interfaces_to_other_machines_are_told(monkeypatch):
    found, mtu = network.judge({"GLOO_SOCKET_IFNAME": "lo"}, 0)
    assert (found.level, found.text) == ("ok", f"lo (127.0.0.1, MTU {mtu}) to other machines")
    monkeypatch.setattr(_C, "interfaces", lambda: [("lo", "127.0.0.1")])
    levels = [network.judge({}, hosts)[0].level for hosts in (1, 2)]
    assert levels == ["note", "problem"]


# ------------------------------------------------------------------------------- self-test, job


def result(**changed: object) -> self_test.Result:
    plain = {"way": "shm", "connection": "2 ranks", "exact": True, "coded": True}
    return self_test.Result(**{**plain, **changed})


@pytest.mark.parametrize(("changed", "level"), [({}, "ok"), ({"coded": False}, "problem")])
def test_wrong_sums_on_one_rank_are_a_problem(changed, level):
    assert finding.worst(self_test.judge_results([result(), result(**changed)])) == level


@pytest.mark.parametrize("ranks", [2, 3])
def test_reads_are_those_of_the_core(ranks):
    level = "ok" if may_read_itself_in_a_child() else "note"
    assert only(self_test.run(ranks), "reads").level == level


def test_ranks_that_differ_are_told_apart():
    reports = [
        job.RankReport(f"host{rank // 2}", {"pycomm": "0.1.0", "MTU": mtu} | extra)
        for rank, (mtu, extra) in enumerate(
            [("9000", {}), ("9000", {}), ("1500", {}), ("1500", {"PYCOMM_ALGO": "ring"})]
        )
    ]
    mtu, algo = job.differences(reports)
    assert (mtu.level, mtu.text) == (
        "warning",
        "9000 on ranks 0-1 (host0); 1500 on ranks 2-3 (host1)",
    )
    assert (algo.level, algo.name) == ("problem", "PYCOMM_ALGO")
    assert "not set on ranks 0-2" in algo.text
    assert [f.level for f in job.differences(reports[:2])] == ["ok"]


def test_findings_of_other_hosts_name_their_ranks():
    bad = Finding("problem", "installed", "torch", "is not installed", "install it")
    good = Finding("ok", "installed", "torch", "2.13.0")
    left = Finding("note", "environment", "PYCOMM_LINK", "100mbit", "unset it")
    reports = [job.RankReport("a", {}, [good]), job.RankReport("b", {}, [bad, left, good])]
    found = job.merged(reports)
    assert [(f.level, f.where) for f in found] == [
        ("ok", ""),
        ("problem", "rank 1 (b)"),
        ("note", "rank 1 (b)"),
    ]
    assert [f.where for f in job.merged([reports[1]] * 2)] == ["", "", ""]


JOB = """if True:
    import os
    from pycomm.doctor import job
    from pycomm.doctor.__main__ import examine
    rank = int(os.environ["RANK"])
    look = examine if os.environ.get("LOOK") else lambda: ([], {})
    findings, status = job.examine(look, rank, 2, not os.environ.get("LOOK"))
    where = {f.topic for f in findings} if not os.environ.get("LOOK") else {"between ranks"}
    print(status, *(f"{f.topic}/{f.name}/{f.level}" for f in findings if f.topic in where), sep=";")
"""


def run_job(*ofs: dict[str, str], **environment: str) -> tuple[list[str], dict[str, bytes]]:
    """Run the doctor on two ranks; return their output, and all that was in their store.

    Args:
        ofs: variables of each rank.
        environment: of both.
    """
    dist = pytest.importorskip("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    common = CLEAN | place | environment
    ranks = [
        interpreter.Interpreter("-c", JOB, env=common | own | {"RANK": str(rank)})
        for rank, own in enumerate(ofs or ({}, {}))
    ]
    said = [process.communicate(timeout=100)[0].strip() for process in ranks]
    return said, {key: store.get(key) for key in store.list_keys()}


def test_a_job_is_tried_by_its_own_group():
    said, _ = run_job()
    assert said == ["0;between ranks/differences/ok;self-test/group/ok", "0"]


def test_without_a_group_each_host_says_why():
    said, _ = run_job({"PYCOMM_ALGO": "ring"}, {"PYCOMM_ALGO": "auto"})
    assert said == ["1;self-test/group/problem"] * 2


def test_no_secret_is_in_the_store_or_the_output():
    said, store = run_job(PYCOMM_SECRET="hush-hush", PYCOMM_SOCKETS="3", LOOK="1")
    assert "between ranks/differences/ok" in said[0]
    assert not any(b"hush" in value for value in store.values())
    assert "hush" not in said[0]


@pytest.mark.timeout(300)
def test_two_ranks_average_on_a_device(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", fake_device.installed(tmp_path))
    found = {finding.name: finding for finding in gpu.run(fake_device.NAME)}
    assert found["ranks"].level == "ok", found
    assert "1 bucket of 65586 values: kernels (" in found["ranks"].text


def test_a_slow_path_is_a_note():
    path = "path of all_reduce, 1 bucket of 65586 values: payloads (no kernels)"
    mps, ranks = gpu.judge({"mps": False, "path": path})
    assert (mps.level, ranks.level) == ("note", "note")


def test_without_a_gpu_the_doctor_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(cli, "examine", lambda: ([], {}))
    (finding,) = cli.alone(cli.parse(["--gpu", "--no-self-test"]))
    assert finding.level == "problem"
    assert "this needs one, its driver, and a torch for CUDA" in finding.text
