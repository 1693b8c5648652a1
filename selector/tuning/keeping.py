"""Trained scorers kept on disk while tuning goes on, so that an interrupted `selector tune` does not train them again."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from profiles.files import write_atomic
from selector.trace import Trace
from selector.tuning.training import Trained, Trainer


def keeping(train: Trainer, folder: Path, settings: Any) -> Trainer:
    """A trainer that keeps what `train` makes in `folder`, and takes it from there where the same was asked for before.

    Args:
        settings: what else a training depends on, told apart by its `repr`.
    """

    def train_or_take(trace: Trace, seconds: float) -> Trained:
        name = training_sha256(trace, settings, seconds)[:32]
        file, about = folder / f"{name}.safetensors", folder / f"{name}.json"
        if about.exists():  # written last
            from selector.scorer import Scorer

            return Trained(Scorer.load(file), **json.loads(about.read_text("utf-8")))
        trained = train(trace, seconds)
        folder.mkdir(parents=True, exist_ok=True)
        trained.scorer.save(file)
        write_atomic(about, json.dumps({"aside": [int(i) for i in trained.aside], "note": trained.note}))
        return trained

    return train_or_take


def training_sha256(trace: Trace, settings: Any, seconds: float) -> str:
    """What tells one training from another: texts, drafts and the target's own distributions, settings and time."""
    digest = hashlib.sha256(repr((sorted(trace.identity.items(), key=lambda item: item[0]), settings, seconds)).encode())
    for text in trace.texts:
        digest.update(f"{text.key!r} {text.num_prompt_tokens}".encode())
        for array in (text.token_ids, text.draft_token_ids, text.draft_logprobs, text.target_token_ids, text.target_logprobs):
            digest.update(b"-" if array is None else array.tobytes())
    return digest.hexdigest()


def forget(folder: Path) -> None:
    """Remove what was kept, and the folder if nothing else is in it."""
    if folder.is_dir():
        for file in folder.iterdir():
            if re.fullmatch(r"\.?[0-9a-f]{32}\.(json|safetensors).*", file.name):  # with what a killed write left behind
                file.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
