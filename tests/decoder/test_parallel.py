"""Tensor-parallel targets: two gloo processes on a CPU say what one says, and rank 0 alone writes the profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decoder.errors import TargetError, UsageError
from decoder.parallel import check_linear, check_shares, join_ranks
from decoder.target import Target
from tests.decoder.helpers import tiny_model, tiny_target

RANK = """
import os
import sys
import torch
from decoder.parallel import join_ranks, rank_of
from decoder.target import Target
from tests.decoder.helpers import text_logits

folder, logits_file, out = sys.argv[1:]
torch.set_num_threads(1)
join_ranks(2, "cpu")
target = Target.load(folder, dtype="float32", tensor_parallel=2)
expected = torch.load(logits_file, weights_only=True)
torch.testing.assert_close(text_logits(target, list(range(20))), expected, rtol=1e-4, atol=1e-4)
assert target.linear == "default" and target.tensor_parallel == 2 and target.embed.shape == (61, 32)
heads = target.new_cache()
target.forward([1, 2], [0, 1], heads)
assert heads.store.keys.shape[1] == 1  # each rank caches its own half of the two key heads
os.write(1, f"rank {rank_of(2)} agrees\\n".encode())  # in one piece: the ranks share a pipe

from costmodel import cli
arguments = f"profile --tp 2 --target {folder} --random-weights --dtype float32 --threads 1 --batch 1,2"
grid = f"--verify-tokens 1,2 --context 4 --rounds 1 --out {out} --quiet"
cli.main(f"{arguments} {grid}".split(), standalone_mode=False)
"""


def test_two_ranks_agree_with_one_process_and_one_of_them_writes(tmp_path: Path) -> None:
    import torch

    from tests.decoder.helpers import text_logits

    model = tiny_model(layers=2)
    model.save_pretrained(tmp_path / "model")
    torch.save(text_logits(Target(model), list(range(20))), tmp_path / "logits.pt")
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    arguments = [str(tmp_path / "model"), str(tmp_path / "logits.pt"), str(tmp_path / "tp.json")]
    done = subprocess.run([*launch, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 agrees" in done.stdout and "rank 1 agrees" in done.stdout
    assert done.stdout.count("tp.json") == 1  # rank 0 alone says where it is
    profile = json.loads((tmp_path / "tp.json").read_text())
    assert profile["identity"]["tensor_parallel"] == 2 and profile["identity"]["target"] == "model"
    assert {(cell["verify_tokens"], cell["num_requests"]) for cell in profile["verify"]} == {(1, 1), (2, 1), (2, 2)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.pt", "model", "rank.py", "tp.json"]


@pytest.mark.parametrize(("ranks", "world"), [(2, None), (2, "4"), (1, "2")])
def test_without_as_many_processes_the_command_is_named(ranks: int, world: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=f"needs {ranks} processes under torchrun, this is 1 of {world or 1}") as caught:
        join_ranks(ranks, "cpu")
    assert ("torchrun --no-python --nproc-per-node" if ranks > 1 else "--tp 2") in str(caught.value.hint)


def test_one_rank_needs_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_ranks(1, "cpu") == "cpu" and tiny_target().tensor_parallel == 1


def test_sharded_layers_stay_as_they_are() -> None:
    assert check_linear("auto") == check_linear("default") == "default"
    with pytest.raises(UsageError, match="prepacked under tensor parallelism"):
        check_linear("prepacked")


@pytest.mark.parametrize(("ranks", "uneven"), [(2, None), (3, "4 heads and 2 key/value heads"), (4, "2 key/value heads")])
def test_heads_that_ranks_cannot_share_are_named(ranks: int, uneven: str | None, tmp_path: Path) -> None:
    model = tiny_model(layers=1)
    if uneven is None:
        check_shares(model.config, ranks)
        return
    model.save_pretrained(tmp_path / "model")
    for load in (lambda: check_shares(model.config, ranks), lambda: Target.load(str(tmp_path / "model"), tensor_parallel=ranks)):
        with pytest.raises(TargetError, match=f"{uneven} cannot be shared by {ranks} ranks"):
            load()


def test_a_torch_that_cannot_run_sharded_layers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 does; without sharding an error of the model stays what it is."""
    model = tiny_model()

    def fail(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("aten.mm.default: got mixed torch.Tensor and DTensor\nand a long explanation")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(TargetError, match="cannot run this model as transformers shards it: aten.mm.*DTensor$") as caught:
        Target(model, tensor_parallel=2)
    assert "newer torch" in str(caught.value.hint)
    with pytest.raises(RuntimeError, match="long explanation"):
        Target(model)
