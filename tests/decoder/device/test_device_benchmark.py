"""benchmarks/device_selection.py runs here, finds the same trees on both ways, and says what it measured on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCORER = ROOT / "decoder" / "assets" / "smollm2-135m-dflash" / "scorer.safetensors"


@pytest.mark.parametrize("extra", [[], ["--scorer", str(SCORER)]], ids=["drafted", "scored"])
def test_the_record_of_a_small_run(extra: list[str]) -> None:
    options = ["--device", "cpu", "--batch", "1,3", "--vocab", "600", "--nodes", "24", "--repeats", "2", "--json", *extra]
    command = [sys.executable, str(ROOT / "benchmarks" / "device_selection.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["device"], record["gpu"], record["host_waits"], record["scored"]) == ("cpu", None, None, bool(extra))
    assert [row["batch"] for row in record["rows"]] == [1, 3]
    for row in record["rows"]:
        assert row["trees_differing"] == 0 and 0 < row["mean_nodes"] <= 24
        assert set(row["timings"]) == {"floor", "device", "host"}
        assert set(row["ratios"]) == {"host_over_device", "device_over_floor"}
        assert all(timing["samples"] == 2 and timing["best_ms"] > 0 for timing in row["timings"].values())
