"""The doctor's command line.

python -m pycomm.doctor
python -m pycomm.doctor --no-self-test
torchrun --nnodes 2 ... -m pycomm.doctor
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
from collections.abc import Sequence
from functools import partial

from pycomm.doctor import gpu, installed, machine, network, probe, self_test, variables
from pycomm.doctor.finding import LEVELS, STATUS, Finding, worst
from pycomm.env import given, place
from pycomm.env import refused as refused_here

MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}


def examine(ranks_here: int = 0, hosts: int = 0) -> tuple[list[Finding], dict[str, str]]:
    """Run every check but the self-test.

    Args:
        ranks_here: number of ranks on this machine; 0: not known.
        hosts: number of hosts of the job; 0: not known.

    Returns:
        The findings, and the facts that all ranks of a job should share.
    """
    found = probe.look()
    set_here = given(*variables.OTHERS)
    core, torch = found["core"], found["torch"].facts
    refused = refused_here() if core.error else variables.refused() | refused_here()
    findings = installed.judge(found)
    impl, no_effect = torch.get("impl", ""), torch.get("no_effect", ())
    findings += variables.judge(set_here, refused, impl, no_effect)
    cores = len(os.sched_getaffinity(0))
    findings.append(machine.judge(cores, machine.cpu_quota(), ranks_here))
    facts = probe.platform_facts() | {"SIMD level": core.facts.get("simd", "none")}
    if not core.error:
        finding, facts["MTU"] = network.judge(set_here, hosts)
        findings.append(finding)
    return findings, facts | variables.shared(set_here)


def alone(options: argparse.Namespace) -> list[Finding]:
    """Examine this machine, and run a self-test with ranks on it."""
    findings, _ = examine()
    if options.self_test:
        findings += self_test.run(options.ranks)
    if options.gpu:
        sees = any((f.level, f.name) == ("ok", "CUDA") for f in findings)
        text = "torch sees no GPU: this needs one, its driver, and a torch for CUDA"
        none = gpu.TOPIC.problem("ranks", text, "see what stands above of CUDA")
        findings += gpu.run() if sees else [none]
    return findings


def show(findings: Sequence[Finding]) -> None:
    """Print findings by topic, with advice below those that are not ok."""
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    print(f"pycomm doctor on {socket.gethostname()}: {system}")
    width = max(len(finding.name) for finding in findings)
    for topic in dict.fromkeys(finding.topic for finding in findings):
        print(f"\n{topic}")
        for finding in (f for f in findings if f.topic == topic):
            where = f" [{finding.where}]" if finding.where else ""
            print(f"  {MARKS[finding.level]:<8}{finding.name:<{width}}  {finding.text}{where}")
            if finding.advice:
                print(f"{'':<{width + 12}}-> {finding.advice}")
    print(f"\n{verdict(findings)}")


def verdict(findings: Sequence[Finding]) -> str:
    """Return one line that counts the findings that are not ok."""
    counts = {level: sum(f.level == level for f in findings) for level in LEVELS}
    said = [
        f"{counts[level]} {level}{'s' * (counts[level] != 1)}"
        for level in ("problem", "warning")
        if counts[level]
    ]
    return ", ".join(said) or "all is well"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.doctor",
        description="Says what of pycomm is installed, how ranks would talk, what stands in the "
        "way, and what to do about it. Under torchrun it compares the ranks and tries their group.",
        epilog="Exit status: 0 all is well, 1 a problem, 2 wrong options, 3 only warnings.",
    )
    add = parser.add_argument
    add("--no-self-test", dest="self_test", action="store_false", help="start no ranks")
    what = "let two ranks average on the GPU"
    add("--gpu", action="store_true", help=what)
    add("--ranks", type=int, default=2, help="of the self-test (2); under torchrun: all")
    options = parser.parse_args(argv)
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: want at least 2")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    try:
        rank, ranks, local = place()
        if rank is not None and ranks is not None and ranks > 1:
            for text in refused_here().values():
                raise ValueError(text)
    except ValueError as error:
        print(f"python -m pycomm.doctor: {error}", file=sys.stderr)
        return 2
    if rank is None or ranks is None or ranks == 1:
        findings = alone(options)
        status = STATUS[worst(findings)]
    else:
        from pycomm.doctor import job

        here = local or 0
        hosts = -(-ranks // here) if here else 0
        look = partial(examine, here, hosts)
        findings, status = job.examine(look, rank, ranks, options.self_test)
    if findings:
        show(findings)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("python -m pycomm.doctor: interrupted", file=sys.stderr)
        sys.exit(130)
