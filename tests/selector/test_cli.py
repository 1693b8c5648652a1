from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from costmodel import Profile
from costmodel.identity import Identity
from profiles.paths import default_plan_path, default_profile_path, default_trace_path
from selector.calibration import Calibration
from selector.cli import main
from selector.commands.tune import load_embedding
from selector.plan import Plan
from selector.price import PriceRange
from selector.trace import Trace
from tests.selector.helpers import markov_trace
from tests.selector.test_scorer import make_scorer

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


def test_replay_shows_the_ceilings_and_draws_figures(machine):
    result = run("replay", "--policies", "exact")
    assert result.exit_code == 0, result.output
    assert "oracle (limit of selection)" in result.stdout and "of gap" in result.stdout
    document = json.loads(run("replay", "--policies", "exact", "--figures", str(machine / "figures"), "--json").stdout)
    assert Path(document["figures"]["throughput"]["path"]).exists()
    assert document["figures"]["rank"]["numbers"]["depths"] == [1, 2, 3, 4]


def test_replay_with_a_plan_replays_the_plans_policy_with_its_settings(machine):
    plan = Plan("taps", policy_settings={"max_nodes": 3}, calibration=Calibration((0.5,) * 4, (-0.3,) * 4))
    path = plan.save(machine / "plan.json")
    rows = json.loads(run("replay", "--plan", str(path), "--policies", "exact", "--json").stdout)["rows"]
    by_role = {row["role"]: row for row in rows}
    assert by_role["best fixed as drafted"]["share_of_gap"] == 0
    assert [row["name"] for row in rows if row["role"] == "asked"] == ["exact", "taps:3"]
    assert next(row for row in rows if row["name"] == "taps:3")["mean_nodes"] <= 3


def test_replay_says_where_a_plan_was_tuned_on_the_very_texts(machine):
    trace = markov_trace(num_texts=6, length=30)
    path = str(Plan("exact", identity={"prompts_sha256": "same"}).save(machine / "plan.json"))
    for sha, said in (("same", True), ("other", False)):
        replace(trace, identity=trace.identity | {"prompts_sha256": sha}).save(default_trace_path())
        result = run("replay", "--plan", path, "--policies", "exact", "--quiet")
        assert result.exit_code == 0 and ("tuned on these very texts" in " ".join(result.stdout.split())) == said
    assert run("tune", "--scorer", "none", "--quiet").exit_code == 0
    assert json.loads(default_plan_path().read_text())["identity"]["prompts_sha256"] == "other"


def test_figures_that_cannot_be_written_and_drafts_of_nan(machine):
    result = run("replay", "--policies", "exact", "--figures", "/dev/null")
    assert result.exit_code == 2 and "cannot be written" in result.stderr
    trace = markov_trace(num_texts=6, length=30)
    trace.texts[0].draft_logprobs[:3, 0] = np.nan
    trace.save(default_trace_path())
    assert "3 of 180 drafts hold NaN" in run("replay", "--policies", "exact", "-q").stdout
    trace.select([1]).save(default_trace_path())
    row = next(line for line in run("replay", "--policies", "exact", "-q").stdout.splitlines() if "exact" in line)
    assert row.split("\u2502")[6].strip() == "-"  # one text, no interval


def test_odd_plans_and_brackets_are_shown_or_refused(machine):
    numbers = ("tokens_per_second", "tokens_per_round", "mean_nodes", "speedup_over_plain", "gain_over_best_fixed")
    rows = [{"name": "[/x] fixed", "policies": ["a [/red] b"], **dict.fromkeys(numbers, 1.0)}]
    folder = machine / "[red]dir"
    path = Plan("exact", rows=rows, reason="a [/red] b", identity={"what_if": {"dtype": ["a", "b"]}}).save(folder / "plan.json")
    shown = run("show", str(path))
    assert shown.exit_code == 0 and "why: a [/red] b" in shown.stdout and f"plan: {path}" in shown.stdout
    assert "A what-if: trace and profile differ (dtype 'a' in the trace, 'b' in the profile)." in shown.stdout
    for wrong in ([{}], [1], [{**rows[0], "tokens_per_second": "a"}], [{**rows[0], "mean_nodes": None}]):
        path = Plan("exact", rows=wrong).save(machine / "odd.json")
        result = run("show", str(path))
        assert result.exit_code == 1 and "row 0 is malformed" in result.stderr


def test_a_plan_of_another_drafter_and_an_output_that_cannot_be_written_are_refused(machine):
    path = str(Plan("exact", identity={"drafter": "other"}).save(machine / "plan.json"))
    for command in (("replay",), ("explain", "--policy", "exact")):
        result = run(*command, "--plan", path)
        assert result.exit_code == 1 and "drafter is 'other' in the plan, expected 'toy-drafter'" in result.stderr
    result = run("tune", "--scorer", "none", "--out", "/proc/nowhere/plan.json")
    assert result.exit_code == 2 and "cannot be written" in result.stderr


def test_replay_with_a_plan_takes_its_sizes_and_the_prices_that_were_found_for_it(machine):
    ranges = [PriceRange(0, 20, 5.0), PriceRange(21, 99, 7.0)]
    for policy, prices in (("priced", (5.0, 7.0)), ("exact", (20.0, 80.0))):  # of another policy: found on the texts replayed
        path = Plan(policy, price=6.0, prices=ranges, max_nodes=3).save(machine / "plan.json")
        document = json.loads(run("replay", "--plan", str(path), "--policies", "priced", "--json").stdout)
        assert document["max_nodes"] == 3
        found = next(row["price"] for row in document["rows"] if row["name"] == "priced")
        assert prices[0] < found < prices[1]
    assert json.loads(run("replay", "--plan", str(path), "--max-nodes", "5", "--json").stdout)["max_nodes"] == 5


def test_explain_prints_draws_and_is_the_same_as_json(machine):
    out = machine / "tree.svg"
    result = run("explain", "--text", "text-2", "--round", "3", "--policy", "exact", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "round 3" in result.stdout and "root" in result.stdout and out.exists()
    document = json.loads(run("explain", "--text", "2", "--round", "3", "--policy", "exact", "--json").stdout)
    assert (document["schema"], document["round_number"], document["path"]) == ("treebudget.explain", 3, None)
    assert f"Accepted {document['num_accepted']} of {document['num_nodes']} nodes" in result.stdout
    assert run("explain", "--anchor", "1", "--json", "-q").exit_code == 0
    for wrong in ("--text nobody", "--anchor 999", "--out tree.gif", "--tokenizer nowhere", "--policy best"):
        result = run("explain", *wrong.split())
        assert result.exit_code == 2 and "Traceback" not in result.output


def test_tune_writes_a_plan_that_show_and_replay_read(machine):
    result = run("tune", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["schema"] == "treebudget.plan"
    path = str(default_plan_path())
    shown = run("show", path)
    assert shown.exit_code == 0 and "why:" in shown.stdout
    assert json.loads(run("show", path, "--json").stdout)["schema"] == "treebudget.plan"
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


@pytest.mark.parametrize("command", [[], ["replay"], ["tune"], ["explain"], ["show"]])
def test_every_help_works_and_commands_have_an_example(command):
    result = run(*command, "-h")
    assert result.exit_code == 0
    assert not command or f"Example: selector {command[0]}" in result.stdout


def test_tune_refuses_prompts_the_drafter_was_trained_on_and_says_why_there_is_no_scorer(machine):
    trace = markov_trace(num_texts=4, length=12)
    path = Trace({**trace.identity, "drafter_saw": 3}, trace.texts).save(machine / "seen.safetensors")
    result = run("tune", "--trace", str(path), "-q")
    assert result.exit_code == 1
    assert "trained on 3 prompts" in result.stderr and "--allow-overlap" in result.stderr
    result = run("tune", "--trace", str(path), "--allow-overlap", "--out", str(machine / "p.json"))
    assert result.exit_code == 0, result.output
    assert "embedding was not given" in result.stderr
    assert run("tune", "--embedding", "missing.safetensors", "-q").exit_code == 1


def test_an_embedding_is_read_whole_or_by_the_name_of_its_tensor(machine):
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    save_file({"wte.weight": table, "other": table + 1}, machine / "e.safetensors")
    np.testing.assert_array_equal(load_embedding(str(machine / "e.safetensors"), "toy"), table)
    np.testing.assert_array_equal(load_embedding(f"{machine / 'e.safetensors'}:other", "toy"), table + 1)
    assert load_embedding(None, "toy") is None


def test_tune_takes_a_trained_scorer_from_a_file(machine):
    trace = Trace.load(default_trace_path())
    identity = {name: trace.identity.get(name) for name in ("target", "drafter", "block_size")}
    path = str(replace(make_scorer(np.random.default_rng(1)), identity=identity).save(machine / "scorer.safetensors"))
    result = run("tune", "--scorer", path, "--json", "-q")
    assert result.exit_code == 0, result.output
    assert any("scored" in row["name"] for row in json.loads(result.stdout)["rows"])
    assert not any("scored" in row["name"] for row in json.loads(run("tune", "--scorer", "none", "--json", "-q").stdout)["rows"])
    other = replace(make_scorer(), identity={**identity, "block_size": 99}).save(machine / "other.safetensors")
    result = run("tune", "--scorer", str(other), "-q")
    assert result.exit_code == 1 and "block_size" in result.stderr
    assert run("tune", "--scorer", "missing.safetensors", "-q").exit_code == 1
