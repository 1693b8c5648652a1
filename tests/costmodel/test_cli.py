from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from costmodel import cli, cliprofile
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

    real = cliprofile.profile_backend
    monkeypatch.setattr(cliprofile, "create_backend", create)
    monkeypatch.setattr(cliprofile, "profile_backend", lambda *args, **options: real(*args, clock=clock, **options))
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
    assert [row["name"] for row in listed if row["where"] == "this machine"] == [document["path"].split("/")[-1][:-5]]
    assert "(this machine; measured; fake, toy; costmodel profile, " in invoke("list").stdout  # of what, not only whence
    assert {"a800-qwen3-4b", "a40-qwen3-8b"} <= {row["name"] for row in listed if row["where"] == "shipped"}
    assert {row["provenance"] for row in listed} >= {"measured", "published", "composed"} and all(row["source"] for row in listed)


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
        if count[0] == 100:
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


@pytest.mark.parametrize("command", ["profile", "show", "list", "compose", "estimate"])
def test_every_help_has_an_example(command):
    result = invoke(command, "-h")
    assert result.exit_code == 0 and f"costmodel {command}" in result.stdout.split("Example:")[1]


def test_a_gpu_that_is_not_here_is_not_pretended(monkeypatch, tmp_path):
    monkeypatch.setattr("costmodel.offer.local_gpus", lambda: [])
    result = invoke("profile", "--gpu", "a40", "--target", "Qwen/Qwen3-8B")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines() + [line for line in result.stderr.splitlines() if line]
    assert lines and all(line.startswith("composed: ") for line in lines)
    assert any("shipped as a40-qwen3-8b" in line for line in lines) and any("nothing was measured" in line for line in lines)
    document = json.loads(invoke("profile", "--gpu", "a40", "--target", "Qwen/Qwen3-8B", "--json").stdout)
    assert document["provenance"] == "composed" and document["path"].endswith("a40-qwen3-8b.json")
    out = tmp_path / "copy.json"
    assert invoke("profile", "--gpu", "a800", "--target", "Qwen/Qwen3-4B", "--out", str(out)).stdout.startswith("published: ")
    assert json.loads(out.read_text())["provenance"] == "published"


def test_a_gpu_without_tables_or_profile_is_estimated_and_says_so(monkeypatch):
    monkeypatch.setattr("costmodel.offer.local_gpus", lambda: [])
    result = invoke("profile", "--gpu", "rtx4090", "--target", "Qwen/Qwen3-4B")
    assert result.exit_code == 0, result.output
    assert all(line.startswith("estimated: ") for line in result.stdout.splitlines())
    assert "roofline" in result.stderr


def test_require_measured_fails_where_nothing_was(monkeypatch):
    monkeypatch.setattr("costmodel.offer.local_gpus", lambda: [])
    for gpu in ("a40", "rtx4090"):
        result = invoke("profile", "--gpu", gpu, "--target", "Qwen/Qwen3-8B", "--require-measured")
        assert result.exit_code == 1 and "no measured profile" in result.stderr and result.stdout == ""
    assert invoke("profile", "--gpu", "abacus").exit_code == 2


def test_a_gpu_that_is_here_is_measured(backend, monkeypatch, tmp_path):
    monkeypatch.setattr("costmodel.offer.local_gpus", lambda: ["NVIDIA H200"])
    result = invoke("profile", "--gpu", "h200", "--target", "some/model", "--out", str(tmp_path / "x.json"), "--require-measured")
    assert result.exit_code == 0, result.output
    assert backend.options["device"] == "cuda"
    assert max(cell["verify_tokens"] for cell in json.loads((tmp_path / "x.json").read_text())["verify"]) == 512


def test_random_weights_and_tensor_parallel_reach_the_backend(backend, tmp_path):
    out = str(tmp_path / "x.json")
    assert invoke("profile", "--target", "a/b", "--random-weights", "--tp", "2", "--out", out).exit_code == 0
    assert backend.options["random_weights"] is True and backend.options["tensor_parallel"] == 2
    assert invoke("profile", "--target", "a/b", "--out", out).exit_code == 0
    assert not {"random_weights", "tensor_parallel"} & set(backend.options)


def test_an_option_that_the_backend_does_not_know_is_named(monkeypatch):
    def create(name, **options):
        raise TypeError("__init__() got an unexpected keyword argument 'tensor_parallel'")

    monkeypatch.setattr(cliprofile, "create_backend", create)
    result = invoke("profile", "--tp", "2")
    assert result.exit_code == 1 and "tensor_parallel" in result.stderr and "Traceback" not in result.output


def test_a_given_grid_is_not_adaptive(backend, tmp_path):
    out = tmp_path / "x.json"
    assert invoke("profile", "--verify-tokens", "1,5", "--context", "7", "--out", str(out)).exit_code == 0
    document = json.loads(out.read_text())
    assert {cell["verify_tokens"] for cell in document["verify"]} == {1, 5} and "interleaved rounds" in document["source"]
    assert not any("adaptively" in note for note in document["notes"])
    assert invoke("profile", "--verify-tokens", "1,5", "--max-context", "7").exit_code == 2


def test_what_would_not_be_heard_is_refused(monkeypatch):
    monkeypatch.setattr("costmodel.offer.local_gpus", lambda: [])
    result = invoke("profile", "--gpu", "a40", "--target", "Qwen/Qwen3-8B", "--dtype", "float32", "--tp", "4")
    assert result.exit_code == 2 and "--dtype, --tp would not be heard" in result.stderr
    assert invoke("profile", "--require-measured").exit_code == 2
    assert invoke("profile", "--requests", "1-99999999999").exit_code == 2
    assert invoke("compose", "--gpu", "h100", "--model", "Qwen/Qwen3-8B", "--out", "").exit_code == 2
