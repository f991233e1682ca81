"""Nothing is loaded from, or written for others to read into, a folder that others could change."""

from __future__ import annotations

import os
import stat

import pytest

from pycomm.folders import distrust, private

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
def test_another_users_folder_is_refused_unless_that_user_is_trusted(tmp_path):
    os.chown(tmp_path, OTHER, OTHER)
    assert "belongs to another user (number 54321)" in distrust(tmp_path)
    assert distrust(tmp_path, OTHER) == ""
