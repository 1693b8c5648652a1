from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from costmodel import Profile
from costmodel.identity import Identity
from profiles.paths import default_plan_path, default_profile_path, default_trace_path
from selector.cli import main
from tests.selector.helpers import markov_trace

POINTS, SECONDS = [1, 2, 4, 8, 9, 16, 24, 33], [0.042, 0.044, 0.046, 0.049, 0.055, 0.060, 0.068, 0.08]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A cache folder in which this machine has a profile and a trace of the default pair."""
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path))
    Profile.from_points(POINTS, SECONDS, draft_seconds=0.005).save(default_profile_path())
    markov_trace(num_texts=6, length=30).save(default_trace_path())
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def test_replay_prints_a_table_and_json(machine):
    result = run("replay", "--policies", "exact,chain:2", "--quiet")
    assert result.exit_code == 0, result.output
    assert "exact" in result.stdout and "best fixed" in result.stdout
    result = run("replay", "--policies", "exact,chain:2", "--json")
    document = json.loads(result.stdout)
    assert document["schema"] == "treebudget.replay"
    by_name = {row["name"]: row for row in document["rows"]}
    assert {"plain", "exact", "chain:2"} <= set(by_name)
    assert by_name["exact"]["speedup_over_plain"] > 1


def test_tune_writes_a_plan_that_show_and_replay_read(machine):
    result = run("tune", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["schema"] == "treebudget.plan"
    path = str(default_plan_path())
    shown = run("show", path)
    assert shown.exit_code == 0 and "why:" in shown.stdout
    assert json.loads(run("show", path, "--json").stdout)["version"] == 1
    assert run("replay", "--plan", path, "--quiet").exit_code == 0
    other = machine / "other.json"
    assert run("tune", "--out", str(other), "-q").exit_code == 0
    assert other.exists()


def test_wrong_usage_exits_2_and_failures_exit_1(machine):
    result = run("replay", "--policies", "best")
    assert result.exit_code == 2
    assert "unknown policy 'best'" in result.stderr and "Traceback" not in result.output
    assert run("replay", "--trace", "missing.safetensors").exit_code == 1
    assert run("show", "missing.json").exit_code == 1
    assert run("replay", "--max-nodes", "0").exit_code == 2
    default_profile_path().unlink()
    result = run("tune")
    assert result.exit_code == 1
    assert "costmodel profile" in result.stderr


def test_a_trace_of_another_block_size_is_refused_by_tune(machine):
    profile = Profile.from_points(POINTS, SECONDS, identity=Identity(block_size=16))
    path = profile.save(machine / "p.json") or machine / "p.json"
    result = run("tune", "--profile", str(path), "-q")
    assert result.exit_code == 1
    assert "block_size" in result.stderr


@pytest.mark.parametrize("command", [[], ["replay"], ["tune"], ["show"]])
def test_every_help_works_and_commands_have_an_example(command):
    result = run(*command, "-h")
    assert result.exit_code == 0
    assert not command or f"Example: selector {command[0]}" in result.stdout
