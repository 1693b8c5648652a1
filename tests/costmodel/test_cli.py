from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from costmodel import cli
from tests.costmodel.fakes import FakeBackend, VirtualClock


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def backend(monkeypatch):
    """A fake engine behind `costmodel profile`; the options it was created with are in `.options`."""
    clock = VirtualClock()
    fake = FakeBackend(clock)

    def create(name, **options):
        fake.options = {"name": name, **options}  # type: ignore[attr-defined]
        return fake

    real = cli.profile_backend
    monkeypatch.setattr(cli, "create_backend", create)
    monkeypatch.setattr(cli, "profile_backend", lambda *args, **options: real(*args, clock=clock, **options))
    return fake


def invoke(*arguments: str):
    return CliRunner().invoke(cli.main, list(arguments))


def test_profile_writes_a_file_and_prints_its_path(backend, tmp_path):
    out = tmp_path / "here.json"
    result = invoke(
        "profile", "--out", str(out), "--verify-tokens", "1-4,8", "--context", "1,64", "--rounds", "3", "--threads", "2"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out) and "profiling" in result.stderr
    cells = json.loads(out.read_text())["verify"]
    assert sorted({cell["verify_tokens"] for cell in cells}) == [1, 2, 3, 4, 8]
    expected = {"target": "smollm2-135m", "drafter": "smollm2-135m-dflash", "dtype": "bfloat16", "device": "cpu", "threads": 2}
    assert backend.options == {"name": "transformers", **expected}
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]  # the partial file is gone


def test_profile_json_is_one_document_and_the_default_place_is_the_cache(backend, cache):
    result = invoke("profile", "--rounds", "3", "--json", "--quiet")
    document = json.loads(result.stdout)
    assert result.stderr == "" and document["diagnostics"]["status"] == "ok"
    assert document["path"].startswith(str(cache)) and document["path"].endswith("_smollm2-135m_bfloat16.json")
    shown = invoke("show", "--json")
    assert shown.exit_code == 0 and json.loads(shown.stdout)["profile"] == document["profile"]
    listed = json.loads(invoke("list", "--json").stdout)["profiles"]
    assert [row["where"] for row in listed] == ["shipped", "shipped", "this machine"]


def test_another_target_has_no_default_drafter(backend, tmp_path):
    assert invoke("profile", "--target", "some/model", "--rounds", "3", "--out", str(tmp_path / "x.json")).exit_code == 0
    assert backend.options["drafter"] is None
    assert invoke("profile", "--drafter", "none", "--rounds", "3", "--out", str(tmp_path / "x.json")).exit_code == 0
    assert backend.options["drafter"] is None


def test_ctrl_c_keeps_what_was_measured(backend, tmp_path):
    out = tmp_path / "here.json"
    count = [0]

    def interrupt(call: int) -> float:
        count[0] += 1
        if count[0] == 150:
            raise KeyboardInterrupt
        return 1.0

    backend.disturb = interrupt
    result = invoke("profile", "--out", str(out), "--rounds", "3")
    assert result.exit_code == 130 and "run the same command again" in result.stderr and "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["here.json.partial.jsonl"]
    assert invoke("profile", "--out", str(out), "--rounds", "3").exit_code == 0
    assert any("earlier run" in note for note in json.loads(out.read_text())["notes"])


def test_show_prints_tables_and_draws(tmp_path):
    picture = tmp_path / "curve.png"
    result = invoke("show", "a800-qwen3-4b", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "published" in result.stdout and "status: ok" in result.stdout and "512" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "nowhere"], 1, "nowhere"),
        (["show"], 2, "no PROFILE given"),
        (["show", "a800-qwen3-4b", "--plot", "curve.txt"], 2, "ending"),
        (["profile", "--verify-tokens", "8-1"], 2, "is not a list"),
        (["profile", "--verify-tokens", "0,1"], 2, "at least 1"),
        (["profile", "--backend", "abacus"], 1, "abacus"),
        (["profile", "--no-such"], 2, "No such option"),
        (["what"], 2, "No such command"),
    ],
)
def test_failures_say_what_and_what_next(arguments, code, message):
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr and "Traceback" not in result.output and result.stdout == ""


def test_a_pickle_is_refused_by_name(tmp_path):
    (tmp_path / "p.json").write_bytes(b"\x80\x04K\x01.")
    result = invoke("show", str(tmp_path / "p.json"))
    assert result.exit_code == 1 and "refused unread" in result.stderr


@pytest.mark.parametrize("command", ["profile", "show", "list"])
def test_every_help_has_an_example(command):
    result = invoke(command, "-h")
    assert result.exit_code == 0 and f"costmodel {command}" in result.stdout.split("Example:")[1]
