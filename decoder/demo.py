"""`make demo`: the main job on the default target, one command after the other, each shown as a user would type it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from costmodel import load_profile
from costmodel.report import plot_cost
from decoder.drafters.registry import find_drafter
from profiles.errors import TreebudgetError
from profiles.files import file_sha256, write_atomic
from profiles.paths import (
    DEFAULT_DRAFTER,
    DEFAULT_DTYPE,
    DEFAULT_TARGET,
    default_plan_path,
    default_profile_path,
    default_trace_path,
)

LIVE_EVERY = 3  # every third of the package's prompts is decoded live; the others tune, so nothing is judged on what tuned it
POLICIES = "plain,chain,fixed:8,fixed:16,unimodal,exact,priced,plan"
OUT = Path("out") / "demo"
SCORER_FILE = "scorer.safetensors"  # beside the drafter's weights: two dozen prompts are too few to train one


def run(*arguments: str) -> None:
    """Show a command and run it with this interpreter's programs; a failure ends the demo with the command's exit code."""
    print(f"\n$ {' '.join(arguments)}", flush=True)
    program = Path(sys.executable).with_name(arguments[0])
    code = subprocess.run([str(program), *arguments[1:]], check=False).returncode
    if code != 0:
        sys.exit(code)


def usable(path: Path, load: Any) -> bool:
    """Whether `path` is there and still readable by this version."""
    try:
        return path.exists() and load(path) is not None
    except TreebudgetError as error:
        print(f"{path} cannot be reused ({error}); it is made anew", flush=True)
        return False


def current_trace(path: Path, drafter: Path) -> Any:
    """The trace at `path`; raises TraceMismatch if it is of other weights than the drafter's."""
    from selector import Trace

    trace = Trace.load(path)
    trace.check({"drafter_sha256": file_sha256(drafter / "model.safetensors")})
    return trace


def split_prompts(folder: Path) -> tuple[Path, Path]:
    """The package's prompts as two files: to tune on, and to decode live."""
    lines = (Path(__file__).parent / "assets" / "prompts.jsonl").read_text("utf-8").splitlines()
    paths = folder / "prompts-tuning.jsonl", folder / "prompts-live.jsonl"
    live = lines[LIVE_EVERY - 1::LIVE_EVERY]
    for path, part in zip(paths, ([line for line in lines if line not in live], live), strict=True):
        write_atomic(path, "\n".join(part) + "\n")
    return paths


def draw(profile: Path, record: dict[str, Any], picture: Path) -> None:
    """The cost curve with its measured points, the convex fit, and where the policies' mean budgets fell."""
    markers = {row["name"]: row["mean_nodes"] for row in record["policies"] if row["mean_nodes"]}
    plot_cost(load_profile(profile), picture, markers=markers)


def main() -> None:
    """Profile, trace, tune, decode live with every policy; print one table and the path of one picture."""
    from selector import Plan

    begun = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    tuning, live = split_prompts(OUT)
    profile = default_profile_path(DEFAULT_TARGET, DEFAULT_DTYPE)
    trace = default_trace_path(DEFAULT_TARGET, DEFAULT_DRAFTER, DEFAULT_DTYPE)
    plan = default_plan_path(DEFAULT_TARGET, DEFAULT_DRAFTER, DEFAULT_DTYPE)
    if not usable(profile, load_profile):
        run("costmodel", "profile", "--out", str(profile))
        plan.unlink(missing_ok=True)
    drafter = find_drafter(DEFAULT_DRAFTER)
    if not usable(trace, lambda path: current_trace(path, drafter)):
        run("decoder", "trace", "--prompts", str(tuning), "--out", str(trace))
        plan.unlink(missing_ok=True)
    if not usable(plan, Plan.load):
        run("selector", "tune", "--profile", str(profile), "--trace", str(trace), "--out", str(plan), "--scorer",
            str(drafter / SCORER_FILE))
    record_path, picture = OUT / "bench.json", OUT / "cost_curve.png"
    run("decoder", "bench", "--prompts", str(live), "--profile", str(profile), "--plan", str(plan), "--policies", POLICIES,
        "--out", str(record_path))
    draw(profile, json.loads(record_path.read_text()), picture)
    print(f"\npicture: {picture.resolve()}\nrecord:  {record_path.resolve()}\n"
          f"done in {(time.monotonic() - begun) / 60:.1f} minutes; the profile, the trace and the plan are kept for the next run")


if __name__ == "__main__":
    main()
