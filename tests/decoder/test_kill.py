"""kill -9 in the middle of recording or training: the next run goes on with what was finished."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from decoder.training.corpus import Corpus
from selector import Trace

ROOT = Path(__file__).resolve().parents[2]

TRACE = """
import sys
from pathlib import Path
from tests.decoder.helpers import tiny_target
from tests.decoder.test_tracing import PROMPTS, random_drafter
from decoder.tracing import record_trace
target = tiny_target(layers=8, scale=0.2)
record_trace(target, random_drafter(target), PROMPTS, Path(sys.argv[1]) / "t.safetensors", max_new_tokens=60, top_k=4, num_rows=1,
             progress=lambda done: print("done", done, flush=True))
print("end", flush=True)
"""

TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.decoder.test_training import CORPUS, SETTINGS, SHAPE, bfloat16_target, prompts
from decoder.training.run import TrainingRun, run_training
from decoder.training.train import Trainer
save = Trainer.save
def saved(self):
    save(self)
    print("done", self.step, flush=True)
Trainer.save = saved
run = TrainingRun(Path(sys.argv[1]), SHAPE, CORPUS, replace(SETTINGS, steps=40))
print("end", run_training(run, bfloat16_target(), prompts(), lambda line: print(line, flush=True))["steps"], flush=True)
"""


def run_until(script: str, folder: Path, kill_at: str | None) -> list[str]:
    """Run `script`, kill it hard when it prints `kill_at`, and return its lines."""
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.strip() == kill_at:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    code = process.wait()
    assert code == (0 if kill_at is None else -signal.SIGKILL), lines[-3:]
    return lines


def test_a_killed_trace_goes_on(tmp_path: Path) -> None:
    run_until(TRACE, tmp_path, "done 3")
    assert not (tmp_path / "t.safetensors").exists()
    lines = run_until(TRACE, tmp_path, None)
    assert int(lines[0].removeprefix("done ")) >= 3  # the finished texts were not decoded again
    assert lines[-1] == "end" and len(Trace.load(tmp_path / "t.safetensors").texts) == 7


def test_a_killed_training_run_goes_on(tmp_path: Path) -> None:
    run_until(TRAIN, tmp_path, "done 5")
    shards = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "corpus").glob("*.safetensors")}
    lines = run_until(TRAIN, tmp_path, None)
    steps = [int(line.removeprefix("done ")) for line in lines if line.startswith("done ")]
    assert steps[0] in (6, 7) and lines[-1] == "end 40"  # at most the step after the last checkpoint was lost
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "corpus").glob("*.safetensors")} == shards
    assert len(Corpus(tmp_path / "corpus", {"target": "tiny"}).texts) == 40
