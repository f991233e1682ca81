"""The environment page: what each variable means, and that nonsense is named."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pycomm import _test
from pycomm.env import cache_home
from pycomm.errors import Error
from pycomm.folders import distrust, private


def environment(**variables: str) -> subprocess.CompletedProcess[str]:
    """What a fresh process reads: the core reads once."""
    code = "import json; from pycomm import _C; print(json.dumps(_C.env()))"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYCOMM_", "MASTER_"))}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **variables}, capture_output=True, text=True
    )


# A variable's value, what it is read as, and its default.
VARIABLES: dict[str, tuple[str, object, object]] = {
    "PYCOMM_TRANSPORT": ("tcp", "tcp", "auto"),
    "PYCOMM_ALGO": ("ring", "ring", "auto"),
    "PYCOMM_LINK": ("20mbit/50mbit", "20mbit/50mbit", ""),
    "PYCOMM_SOCKETS": ("4", 4, 0),
    "PYCOMM_CONGESTION": ("cubic", "cubic", "auto"),
    "PYCOMM_INTERFACE": ("eth1", "eth1", ""),
    "PYCOMM_PORTS": ("29600-29700", "29600-29700", ""),
    "PYCOMM_ADVERTISE": ("203.0.113.7", "203.0.113.7", ""),
    "MASTER_ADDR": ("node7", "node7", ""),
    "PYCOMM_TIMEOUT": ("1.5", 1.5, 300.0),
    "PYCOMM_SECRET": ("hush", "hush", ""),
    "PYCOMM_TLS": ("on", "on", "auto"),
    "PYCOMM_HOST_ID": ("box", "box", ""),
    "PYCOMM_TRACE": ("/tmp/traces", "/tmp/traces", ""),
}


def name_of(variable: str) -> str:
    return variable.removeprefix("PYCOMM_").lower()


def test_defaults():
    defaults = {name_of(variable): default for variable, (_, _, default) in VARIABLES.items()}
    assert json.loads(environment().stdout) == defaults


def test_every_variable_is_read():
    given = {variable: value for variable, (value, _, _) in VARIABLES.items()}
    wanted = {name_of(variable): read for variable, (_, read, _) in VARIABLES.items()}
    assert json.loads(environment(**given).stdout) == wanted


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("PYCOMM_TRANSPORT", "rdma", "auto, shm, tcp"),
        ("PYCOMM_ALGO", "rings", "auto, flat, direct"),
        ("PYCOMM_LINK", "fast", "200mbit"),
        ("PYCOMM_LINK", "50mbit/", "20mbit/50mbit"),
        ("PYCOMM_LINK", "/20mbit", "20mbit/50mbit"),
        ("PYCOMM_SOCKETS", "0", "from 1 to 16"),
        ("PYCOMM_SOCKETS", "2x", "from 1 to 16"),
        ("PYCOMM_PORTS", "29700-29600", "29600-29700"),
        ("PYCOMM_PORTS", "0", "from 1 to 65535"),
        ("PYCOMM_PORTS", "1-65536", "from 1 to 65535"),
        ("PYCOMM_PORTS", "29600-", "or one port"),
        ("PYCOMM_PORTS", "a-b", "or one port"),
        ("PYCOMM_PORTS", "1-2-3", "or one port"),
        ("PYCOMM_TLS", "1", "auto, on, off"),
        ("PYCOMM_TIMEOUT", "-1", "seconds"),
        ("PYCOMM_TIMEOUT", "nan", "seconds"),
    ],
)
def test_nonsense_names_the_variable(variable, value, hint):
    outcome = environment(**{variable: value})
    last = outcome.stderr.strip().splitlines()[-1]
    assert outcome.returncode == 1
    assert last.startswith(f"pycomm.errors.Error: {variable}={value} is invalid")
    assert hint in last


def test_a_secret_is_read_from_its_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text("hush hush\n")
    file.chmod(0o600)
    (tmp_path / "link").symlink_to(file)  # as Kubernetes mounts secrets
    for path in (file, tmp_path / "link"):
        values = json.loads(environment(PYCOMM_SECRET=f"file:{path}").stdout)
        assert values["secret"] == "hush hush"


STRANGER = 65534


def test_a_secret_under_another_name_is_refused():
    last = environment(PYCOMM_SECRET_FILE="/run/secrets/x").stderr.strip().splitlines()[-1]
    assert last.startswith("pycomm.errors.Error: PYCOMM_SECRET_FILE is not read")


def spoil_owner(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can play two users")
    os.chown(file, STRANGER, STRANGER)


@pytest.mark.parametrize(
    ("spoil", "hint"),
    [
        (lambda file: file.chmod(0o644), "chmod 600"),
        (lambda file: file.chmod(0o620), "chmod 600"),
        (spoil_owner, f"belongs to user {STRANGER}"),
        (lambda file: file.write_text("\n"), "is empty"),
        (lambda file: file.write_text("x" * 5000), "4096 bytes"),
        (lambda file: file.unlink(), "No such file"),
    ],
)
def test_a_secret_that_others_could_read_or_write_is_refused(tmp_path, spoil, hint):
    file = tmp_path / "secret"
    file.write_text("hush hush")
    file.chmod(0o600)
    spoil(file)
    last = environment(PYCOMM_SECRET=f"file:{file}").stderr.strip().splitlines()[-1]
    assert last.startswith(f"pycomm.errors.Error: PYCOMM_SECRET=file:{file} is refused")
    assert hint in last


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("1000", 1000),
        ("8bit", 1),
        ("8kbit", 1e3),
        ("200mbit", 25e6),
        ("1.5gbit", 187.5e6),
        ("3KB", 3e3),
        ("10MB", 1e7),
        ("2GB", 2e9),
        ("1e3MB", 1e9),
    ],
)
def test_rates(text, bytes_per_second):
    assert _test.parse_rate(text) == bytes_per_second


@pytest.mark.parametrize(
    ("text", "sent", "received", "paced"),
    [("", 0, 0, 0), ("1MB", 1e6, 1e6, 1e6), ("2MB/5MB", 2e6, 5e6, 0), ("1MB/1MB", 1e6, 1e6, 0)],
)
def test_two_rates_describe_a_link_and_pace_nothing(text, sent, received, paced):
    assert _test.parse_link_rate(text) == (sent, received, paced)


@pytest.mark.parametrize("text", ["", "mbit", "-1mbit", "0", "nan", "1e308gbit", "1 gbit", "1mb"])
def test_bad_rates_are_refused(text):
    with pytest.raises(Error, match="cannot read the rate"):
        _test.parse_rate(text)


def test_a_user_without_an_account_has_no_cache(monkeypatch):
    """As in containers with any uid. `_build` then says that XDG_CACHE_HOME is to be set."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert not cache_home().parent.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_home() == Path("/somewhere")


# -------------------------------------------------------------------------------- trusted folders
# Nothing is loaded from, or written for others to read into, a folder that others could change.


OTHER = 54321

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def test_a_folder_of_ones_own_is_trusted(tmp_path):
    private(tmp_path / "own")
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
    assert distrust(tmp_path / "own") == ""
    private(tmp_path / "own")


@pytest.mark.parametrize(("mode", "good"), [(0o755, True), (0o775, False), (0o757, False)])
def test_others_must_not_write(tmp_path, mode, good):
    tmp_path.chmod(mode)
    assert (distrust(tmp_path) == "") == good
    if not good:
        with pytest.raises(PermissionError, match="name a folder that only you can write"):
            private(tmp_path)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "there").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(PermissionError, match="is a link"):
        private(tmp_path / "link")


@as_root
def test_another_users_folder_is_not_trusted(tmp_path):
    os.chown(tmp_path, OTHER, OTHER)
    assert "belongs to another user (number 54321)" in distrust(tmp_path)
