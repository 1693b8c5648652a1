from __future__ import annotations

import os
import stat

import pytest

from profiles.errors import FileFormatError
from profiles.files import read_json, write_atomic


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "a" / "x.json", "old")
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_written_files_are_readable_by_others_as_the_umask_says(tmp_path):
    mask = os.umask(0o022)
    try:
        assert stat.S_IMODE(write_atomic(tmp_path / "x", "a").stat().st_mode) == 0o644
    finally:
        os.umask(mask)


def test_json_is_checked_for_schema_and_version(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('\ufeff  {"schema": "s", "version": 1, "n": 2}', encoding="utf-8")
    assert read_json(path, "s")["n"] == 2
    with pytest.raises(FileFormatError, match="expected 't'"):
        read_json(path, "t")
    path.write_text('{"schema": "s", "version": 9}')
    with pytest.raises(FileFormatError, match="reads 1 to 1"):
        read_json(path, "s")
    path.write_text("[" * 100_000)
    with pytest.raises(FileFormatError, match="refused unread"):
        read_json(path, "s")
    path.write_text('{"a":' * 100_000)
    with pytest.raises(FileFormatError, match="not valid JSON"):
        read_json(path, "s")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json", "s")
