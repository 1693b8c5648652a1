"""The code for GPUs on torch's own code for CUDA, over a stand-in for the runtime: what is captured, what waits, what is refused.

Needs a CUDA build of torch (pip's, on Linux), a C++ compiler and CUDA's headers, but no GPU; skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REFUSED = {"item", "nonzero", "by mask", "unique", "to the host", "from the host", "wait"}


def headers() -> Path | None:
    """A folder of CUDA's headers that is complete, or None."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr"]
    folders = [Path(home) / "include" for home in homes if home]
    return next((each for each in folders if (each / "crt" / "host_defines.h").exists()), None)


pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch built for CUDA; a GPU it does not need"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the real captures are tested"),
    pytest.mark.skipif(shutil.which("g++") is None or headers() is None, reason="needs g++ and CUDA's headers (CUDA_HOME)"),
]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stand_in")
    library = folder / "libcuda.so.1"  # torch looks for the driver under this name; the rest is found by being preloaded
    build = ["g++", "-O1", "-fPIC", "-shared", f"-I{headers()}", str(HERE / "stand_in.cpp"), "-o", str(library), "-ldl"]
    subprocess.run(build, check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-m", "tests.cuda_stand_in.captures"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_stand_in_refuses_what_a_capture_refuses(record: dict[str, Any]) -> None:
    assert record["device"] == "Stand-in"
    assert {name for name, nodes in record["controls"].items() if nodes < 0} == REFUSED
    assert record["controls"]["add"] == 1 and record["controls"]["sort"] > 1 and record["controls"]["product"] >= 1


def test_the_search_is_captured_and_never_waited_for(record: dict[str, Any]) -> None:
    for name, found in record["search"].items():
        assert found["nodes"] > 100 and found["replays"] == 1, name
        assert (found["waits"], found["refusals"]) == (0, 0), name
    for policy in ("fixed", "exact", "priced", "unimodal"):  # the scorer is in the graph
        assert record["search"][f"{policy} scored"]["nodes"] > record["search"][f"{policy} drafted"]["nodes"] + 50


def test_forwards_and_profiles_are_captured(record: dict[str, Any]) -> None:
    for nodes in record["forwards"].values():
        assert min(nodes.values()) > 50
    assert record["profile"]["refusals"] == 0
    assert record["profile"]["cells"] >= 4 and record["profile"]["replays"] > record["profile"]["cells"]
