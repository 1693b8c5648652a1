"""The command line: exit codes, JSON on stdout, notes on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from costmodel import Profile
from decoder.cli import main
from decoder.commands.options import ModelChoice
from decoder.identity import target_identity
from decoder.loop import Decoder
from decoder.prompts import encode_prompt, load_prompts
from decoder.target import Target
from tests.decoder.helpers import LibraryDrafter, save_tiny_target, tiny_dflash

COMMANDS = ("pull", "trace", "train", "generate", "bench", "check")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture()
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello there", "dataset": "a"}\n{"turns": ["what is it?"], "dataset": "b"}\n')
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path / "cache"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture()
def library(folder: str, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter of every command knows the prompts' texts."""
    def load(_models: ModelChoice, target: Target) -> Any:
        texts = []
        for prompt in load_prompts(prompts):
            ids = encode_prompt(target.tokenizer, prompt.text)
            texts.append(ids + Decoder(target).generate(ids, 24).token_ids)
        return LibraryDrafter(target, texts)

    monkeypatch.setattr(ModelChoice, "load_drafter", load)


@pytest.fixture()
def profile(folder: str, tmp_path: Path) -> str:
    target = Target.load(folder, dtype="float32")
    made = Profile.from_points([1, 8, 32], [1e-3, 1.1e-3, 2e-3], draft_seconds=1e-4, identity=target_identity(target))
    made.save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_prompts_beyond_the_context_are_left_out_and_named(folder: str, prompts: str, profile: str) -> None:
    with Path(prompts).open("a") as file:
        file.write('{"prompt": "' + "x" * 600 + '", "key": "epic"}\n')
    arguments = ("--target", folder, "--drafter", "none", "--dtype", "float32", "--max-new-tokens", "8", "--prompts", prompts,
                 "--profile", profile, "--policies", "plain")
    result = run("bench", *arguments, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["prompts"]["num_prompts"] == 2
    assert "left out: 1 of 3 prompts have more than the 504 tokens that fit a context of 512: epic (602)" in result.stderr
    Path(prompts).write_text('{"prompt": "' + "x" * 600 + '"}\n')
    result = run("bench", *arguments)
    assert result.exit_code == 1 and "1 of 1 prompts have more than" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "-h")
    assert result.exit_code == 0 and f"decoder {command}" in result.output


def test_generate_plainly_without_a_profile(folder: str) -> None:
    target = Target.load(folder, dtype="float32")
    ids = encode_prompt(target.tokenizer, "hello")
    expected = target.tokenizer.decode(Decoder(target).generate(ids, 12).token_ids, skip_special_tokens=True)
    result = run("generate", "hello", "--target", folder, "--dtype", "float32", "--max-new-tokens", "12")
    assert result.exit_code == 0 and result.stdout == expected + "\n"
    assert "decodes plainly" in result.stderr and "12 tokens" in result.stderr
    quiet = run("generate", "hello", "--target", folder, "--dtype", "float32", "--max-new-tokens", "12", "-q", "--json")
    document = json.loads(quiet.stdout)
    assert quiet.stderr == "" and document["text"] == expected and document["policy"] == "plain"
    assert document["finish_reason"] == "length" and len(document["token_ids"]) == 12


def test_generate_with_a_policy(folder: str, library: None, profile: str) -> None:
    arguments = ["generate", "hello there", "--target", folder, "--dtype", "float32", "--max-new-tokens", "20", "--json", "-q"]
    plain = json.loads(run(*arguments, "--policy", "plain").stdout)
    for policy in ("chain", "fixed:6", "priced"):
        result = run(*arguments, "--policy", policy, "--profile", profile)
        document = json.loads(result.stdout)
        assert document["token_ids"] == plain["token_ids"] and document["policy"] == policy
    assert document["tokens_per_round"] > plain["tokens_per_round"] == 1.0


def test_generate_with_a_plan(folder: str, library: None, profile: str, tmp_path: Path) -> None:
    from selector import Plan

    Plan(policy="fixed:4", identity={"dtype": "float32"}).save(tmp_path / "plan.json")
    arguments = ["generate", "hello there", "--target", folder, "--max-new-tokens", "10", "--plan", str(tmp_path / "plan.json")]
    result = run(*arguments, "--dtype", "float32", "--profile", profile)
    assert result.exit_code == 0 and "policy fixed:4" in result.stderr
    Plan(policy="fixed:4", identity={"dtype": "bfloat16"}).save(tmp_path / "plan.json")
    result = run(*arguments, "--dtype", "float32", "--profile", profile)
    assert result.exit_code == 1 and "dtype" in result.stderr


def test_bench_json_and_file(folder: str, library: None, profile: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = run("bench", "--target", folder, "--dtype", "float32", "--prompts", prompts, "--max-new-tokens", "20",
                 "--policies", "plain,chain,fixed:8,exact", "--profile", profile, "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert json.loads(out.read_text()) == record and "ceiling" in result.stderr
    fields = {"name", "tokens_per_second", "tokens_per_round", "mean_nodes", "speedup_over_plain", "predicted_tokens_per_second",
              "identical_to_plain"}
    assert [row["name"] for row in record["policies"]] == ["plain", "chain", "fixed:8", "exact"]
    assert all(fields <= set(row) and row["identical_to_plain"] == 2 for row in record["policies"])
    table = run("bench", "--target", folder, "--dtype", "float32", "--prompts", prompts, "--max-new-tokens", "8",
                "--policies", "chain", "--profile", profile, "--quiet")
    assert table.exit_code == 0 and "tok/round" in table.stdout and table.stderr == ""


def test_check(folder: str, library: None, prompts: str) -> None:
    result = run("check", "--target", folder, "--prompts", prompts, "--max-new-tokens", "16", "--policies", "chain,fixed:6",
                 "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"]


def test_trace(folder: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from selector import Trace

    monkeypatch.setattr(ModelChoice, "load_drafter", lambda _models, target: tiny_dflash(target))
    out = tmp_path / "trace.safetensors"
    result = run("trace", "--target", folder, "--dtype", "float32", "--prompts", prompts, "--max-new-tokens", "12",
                 "--out", str(out), "--top-k", "4")
    assert result.exit_code == 0, result.output
    trace = Trace.load(out)
    assert len(trace.texts) == 2 and trace.identity["drafter"] == "tiny-dflash"
    assert [entry.name for entry in tmp_path.iterdir() if "parts" in entry.name and any(entry.rglob("*.safetensors"))] == []


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["bench", "--policies", ","], 2, "names no policy"),
    (["bench", "--policies", "fixed:4,fixed:04"], 2, "named twice"),
    (["bench", "--policies", "chain,best"], 2, "unknown policy 'best'"),
    (["bench", "--out", "/proc/nowhere/record.json"], 2, "cannot be written"),
    (["check", "--policies", ","], 2, "names no policy"),
    (["check", "--policies", "plain"], 2, "policies that draft"),
    (["generate", "x", "--seed", "-1"], 2, "--seed"),
    (["train", "--prompts", "x", "--minutes", "nan"], 2, "minutes"),
    (["bench", "--policies", "chain,chain"], 2, "twice"),
    (["bench", "--dtype", "int3"], 2, "int3"),
    (["bench"], 1, "decoder pull smollm2-135m"),
    (["generate"], 2, "Missing argument"),
    (["generate", "x", "--target", "./nowhere"], 1, "no folder"),
    (["generate", "x", "--temperature", "-1"], 2, "temperature"),
    (["pull", "nothing"], 2, "registered are smollm2-135m"),
    (["check", "--prompts", "missing.jsonl"], 2, "no prompts file"),
    (["nonsense"], 2, "No such command"),
])
def test_exit_codes(arguments: list[str], code: int, said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code and said in result.stderr
    assert "Traceback" not in result.output


def test_missing_profile_says_how_to_measure(folder: str, library: None, prompts: str) -> None:
    result = run("bench", "--target", folder, "--dtype", "float32", "--prompts", prompts)
    assert result.exit_code == 2 and "costmodel profile" in result.stderr


def test_profile_of_another_dtype_is_refused(folder: str, library: None, prompts: str, profile: str) -> None:
    """Case 15: the error names the field."""
    result = run("bench", "--target", folder, "--dtype", "bfloat16", "--prompts", prompts, "--profile", profile)
    assert result.exit_code == 1 and "dtype" in result.stderr
