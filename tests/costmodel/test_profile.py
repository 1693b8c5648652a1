from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from costmodel import Profile, StageCell, VerifyCell, cli, load_profile
from costmodel.errors import FileFormatError, ProfileError
from costmodel.loading import measured_profiles, profile_path
from tests.costmodel.fakes import IDENTITY


def full_profile() -> Profile:
    bare = Profile.from_points([1, 2, 1, 2], [1.0, 2.0, 3.0, 4.0], [0, 0, 9, 9], identity=IDENTITY, draft_seconds=0.1)
    sampled = VerifyCell(4, 0, 1, 5.0, 4.5, 6.0, 9, ("bimodal", "drift"))
    select = StageCell("select", 8, 0, 1, 0.0, 0.0, 0.1, 9, ("drift",))
    return replace(
        bare, verify=(*bare.verify, sampled), stages=(*bare.stages, select), notes=("a note",), executable_verify_tokens=(1, 2, 4)
    )


def test_a_profile_survives_the_file(tmp_path):
    profile = full_profile()
    again = Profile.load(profile.save(tmp_path / "deep" / "here.json"))
    assert set(again.verify) == set(profile.verify)
    assert again == replace(profile, verify=again.verify)
    document = json.loads((tmp_path / "deep" / "here.json").read_text())
    assert (document["schema"], document["version"]) == ("treebudget.profile", 1)
    assert len(document["verify"]) == 1 and len(document["verify_grid"]) == 1
    assert [item.name for item in (tmp_path / "deep").iterdir()] == ["here.json"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"schema": "other"}, FileFormatError, "schema"),
        ({"version": 2}, FileFormatError, "version"),
        ({"version": True}, FileFormatError, "version"),
        ({"provenance": "guessed"}, ProfileError, "provenance"),
        ({"identity": {"gpu": "x"}}, ProfileError, "unknown fields: gpu"),
        ({"identity": {"mode": "fast"}}, ProfileError, "mode"),
        ({"verify": [{"verify_tokens": 1}]}, ProfileError, "lacks fields"),
        ({"verify": [], "verify_grid": []}, ProfileError, "at least one"),
        ({"verify_grid": [{"verify_tokens": [1, 2], "seconds_by_context_tokens": {"0": [1.0]}}]}, ProfileError, "2 sizes"),
        ({"verify_grid": [{"verify_tokens": [1]}]}, ProfileError, "malformed"),
        ({"verify_grid": [7]}, ProfileError, "malformed"),
        (
            {"stages": [{"stage": "sleep", "size": 1, "context_tokens": 0, "num_requests": 1, "seconds": 1}]},
            ProfileError,
            "sleep",
        ),
        ({"stages": [7]}, FileFormatError, "malformed"),
        ({"requests_rule": "free"}, ProfileError, "requests_rule"),
        *(({"executable_verify_tokens": sizes}, ProfileError, "executable_verify_tokens is") for sizes in
          ([], ["abc"], [float("inf")], [-4, 0], {"first": 1, "last": 10**12}, {"first": 5, "last": 2}, 7)),
        *(({"identity": identity}, ProfileError, "must") for identity in
          ({"block_size": "x"}, {"block_size": -3}, {"tensor_parallel": "2"}, {"tensor_parallel": -2}, {"device": 5},
           {"model_shape": [1]}, {"model_shape": {"experts": "many"}})),
        *(({"verify": [{"verify_tokens": 1, "context_tokens": 0, "num_requests": 1, "seconds": 0.01} | cell], "verify_grid": []},
           ProfileError, said) for cell, said in
          [({"seconds": 10**401}, "finite"), ({"seconds": 1e-200}, "finite"), ({"seconds": 1e200}, "finite"),
           ({"verify_tokens": 10**401}, "an integer"), ({"num_samples": "many"}, "num_samples"),
           ({"high_seconds": 0.1}, "together"),
           ({"low_seconds": 5.0, "high_seconds": 9.0}, "outside of"), ({"low_seconds": -1.0, "high_seconds": 9.0}, "outside of"),
           ({"low_seconds": 0.0, "high_seconds": 9.0}, "positive")]),
    ],
)
def test_bad_content_is_named(tmp_path, change, error, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**full_profile().to_dict(), **change}))
    with pytest.raises(error, match=message):
        Profile.load(path)


def test_a_source_in_brackets_is_shown_and_a_bad_file_hides_no_other(tmp_path, monkeypatch):
    profile = replace(full_profile(), source="see [/home/me/x] and [red]this[/red]")
    shown = CliRunner().invoke(cli.main, ["show", str(profile.save(tmp_path / "profiles" / "fine.json"))])
    assert shown.exit_code == 0 and "see [/home/me/x] and [red]this[/red]" in shown.stdout
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path))
    (tmp_path / "profiles" / "folder.json").mkdir()
    (tmp_path / "profiles" / "gone.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "profiles" / "digits.json").write_text('{"schema": "treebudget.profile", "version": ' + "1" * 5001 + "}")
    listed = CliRunner().invoke(cli.main, ["list"])
    assert listed.exit_code == 0 and "fine" in listed.stdout and listed.stdout.count("unreadable") == 3


@pytest.mark.parametrize("content", [b"", b"[1]", b"{not json", b"import os", b"\x80\x04", b'{"a": "\xff"}'])
def test_what_is_no_json_object_is_refused(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError):
        Profile.load(path)


def test_profiles_are_found_by_path_name_and_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path))
    assert measured_profiles() == {}
    full_profile().save(tmp_path / "profiles" / "mine.json")
    assert profile_path("mine") == tmp_path / "profiles" / "mine.json"
    assert load_profile("mine").identity == IDENTITY
    assert load_profile("a800-qwen3-8b").provenance == "published"
    with pytest.raises(ProfileError, match="nowhere") as caught:
        load_profile("nowhere")
    assert "a800-qwen3-8b" in str(caught.value.hint) and "mine" in str(caught.value.hint)
