from __future__ import annotations

import pytest

import profiles
from costmodel import load_profile
from profiles.errors import UsageError


def test_shipped_profiles_are_found_by_name():
    gpus = {name.split("-")[0] for name in profiles.names()}
    assert {"a40", "a100", "a800", "h100", "h200", "l40s", "b200"} <= gpus
    assert {"a800-qwen3-4b", "a800-qwen3-8b", "a40-qwen3-8b", "a100-qwen3-8b", "h100-qwen3-8b"} <= set(profiles.names())
    for name in profiles.names():
        assert profiles.find(name).is_file() and profiles.find(name).stat().st_size < 120_000
    with pytest.raises(UsageError, match="h999"):
        profiles.find("h999")


@pytest.mark.parametrize("name", ["a800-qwen3-4b", "a800-qwen3-8b"])
def test_published_tables_say_where_they_come_from(name):
    profile = load_profile(name).profile
    assert profile.provenance == "published" and "2606.01813" in profile.source and "MIT" in profile.source
    assert any("smoothed" in note for note in profile.notes)
    assert min(cell.verify_tokens for cell in profile.verify) == 1 and len(profile.verify) == 512 * 9
    assert profile.stages[0].stage == "draft" and profile.stages[0].seconds == 0.0065
