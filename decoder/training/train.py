"""The training run: batches, cosine schedule, held-out evaluation, checkpoints that survive a kill, one JSON record."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoder.drafters.dflash import DFlashDrafter, save_dflash_model
from decoder.drafters.dflash_config import DFlashConfig
from decoder.drafters.dflash_model import DFlashModel
from decoder.errors import UsageError
from decoder.training.batches import Batch, draw_texts, make_batch
from decoder.training.checkpoint import load_checkpoint, save_checkpoint
from decoder.training.corpus import Corpus, Text
from decoder.training.errors import TrainingError
from decoder.training.evaluate import evaluate
from decoder.training.loss import BlocksNetwork, drafter_loss, output_vocabulary, position_weights
from profiles.files import write_atomic

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainSettings:
    """How to train. `minutes`, when given, ends the run by the clock and drives the schedule; else `steps` does."""

    steps: int = 12000
    minutes: float | None = None
    texts_per_step: int = 4
    roots_per_text: int = 24
    learning_rate: float = 8e-4
    warmup_steps: int = 150
    weight_decay: float = 0.01
    hard_share: float = 0.5
    hardness: float = 0.6
    position_decay: float = 4.0
    frequent_tokens: int = 6144
    random_tokens: int = 1024
    evaluate_every: int = 1000
    checkpoint_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what ends the run; raises UsageError."""
        if self.steps < 1 or (self.minutes is not None and not 0 < self.minutes < math.inf):
            raise UsageError(f"training ends after a number of steps or minutes above 0, got {self.steps} and {self.minutes}")


class Trainer:
    """One run in one folder: `checkpoint.safetensors` while it goes on, `model.safetensors` and `record.json` at the end.

    `start` sets the first weights; `start_name` says in checkpoint and record where they come from (None: the target).
    """

    def __init__(self, config: DFlashConfig, target: Any, corpus: Corpus, heldout: Corpus, settings: TrainSettings,
                 work: Path, *, start: Callable[[DFlashModel], None] | None = None, report: Report | None = None,
                 start_name: str | None = None) -> None:
        torch.manual_seed(settings.seed)
        self.config, self.corpus, self.heldout, self.settings, self.work = config, corpus, heldout, settings, work
        self.report, self.start_name = report or (lambda line: None), start_name
        self.embedding = target.get_input_embeddings().weight.detach().to(torch.bfloat16)
        self.head = target.get_output_embeddings().weight.detach().to(torch.bfloat16)
        self.device = self.embedding.device
        self.model = DFlashModel(config).to(self.device)
        self.network = BlocksNetwork(self.model, self.embedding)
        if start is not None:
            start(self.model)
        self.texts = [text for text in corpus.texts if text.num_roots >= config.block_size]
        if not self.texts or not heldout.texts:
            raise TrainingError(f"{len(self.texts)} of {len(corpus.texts)} texts hold a block of {config.block_size}, and "
                                f"{len(heldout.texts)} are held out", hint="take a smaller --block-size or more prompts")
        groups = [{"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
                  {"params": [p for p in self.model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
        self.frequent = corpus.frequent_tokens(self.texts, settings.frequent_tokens, self.head.shape[0])
        self.weights = position_weights(config.block_size, settings.position_decay).to(self.device)
        self.step, self.seconds, self.history = 0, 0.0, []  # type: ignore[var-annotated]
        self.checkpoint = work / "checkpoint.safetensors"
        if self.checkpoint.exists():
            self._resume()

    def identity(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be continued."""
        return {"drafter": self.config.raw, "seed": self.settings.seed, "start": self.start_name}

    def _resume(self) -> None:
        state = load_checkpoint(self.checkpoint, self.model, self.optimiser, self.identity())
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        if self.settings.minutes is None and self.step > self.settings.steps:
            raise TrainingError(f"{self.checkpoint} has {self.step} steps behind it, more than {self.settings.steps}",
                                hint="ask for more, or train in another --work folder")

    def progress(self) -> float:
        """Share of the run that is done, 0 to 1, which drives the learning rate."""
        if self.settings.minutes is not None:
            return min(self.seconds / (60 * self.settings.minutes), 1.0)
        return min(self.step / self.settings.steps, 1.0)

    def learning_rate(self) -> float:
        """Linear warm-up, then half a cosine down to 2 % of the peak."""
        warmup = min((self.step + 1) / self.settings.warmup_steps, 1.0)
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress()))
        return self.settings.learning_rate * warmup * cosine

    def run(self) -> dict[str, Any]:
        """Train to the end and return the record, which is also written to record.json."""
        while self.progress() < 1.0:
            begin = time.perf_counter()
            loss, accuracy = self.train_step()
            self.seconds += time.perf_counter() - begin
            self.step += 1
            if self.step % 50 == 0:
                self.report({"step": self.step, "seconds": round(self.seconds, 1), "progress": round(self.progress(), 4),
                             "loss": round(loss, 4), "accuracy": [round(a, 3) for a in accuracy]})
            if self.step % self.settings.evaluate_every == 0:
                self.evaluate()
            if self.step % self.settings.checkpoint_every == 0:
                self.save()
        self.evaluate()
        self.save()
        return self.finish()

    def train_step(self) -> tuple[float, list[float]]:
        """One optimiser step; the random draws depend on seed and step alone, so a resumed run draws the same."""
        settings = self.settings
        random = np.random.default_rng((settings.seed, self.step))
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step)
        texts = draw_texts(self.texts, settings.texts_per_step, random)
        batch = make_batch(self.corpus, texts, settings.roots_per_text, self.config.block_size, settings.hardness, random)
        vocabulary = output_vocabulary(batch, self.frequent, self.head.shape[0], settings.random_tokens, generator)
        batch, vocabulary = batch.to(self.device), vocabulary.to(self.device)
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()
        # Weights are kept in float32 and cast once a step, so that every operation runs fused in bfloat16.
        cast = {f"model.{name}": parameter.to(self.embedding.dtype) for name, parameter in self.model.named_parameters()}

        def forward(batch: Batch) -> torch.Tensor:
            return torch.func.functional_call(self.network, cast, (batch,))

        loss, accuracy = drafter_loss(forward, batch, self.head, vocabulary, self.weights, settings.hard_share)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        return float(loss.detach()), accuracy.tolist()

    def drafter(self) -> DFlashDrafter:
        """The drafter as it would be shipped: in bfloat16."""
        frozen = DFlashModel(self.config)
        frozen.load_state_dict(self.model.state_dict())
        head = self.head
        return DFlashDrafter(frozen.to(self.embedding), self.embedding, lambda hidden: torch.nn.functional.linear(hidden, head))

    def evaluate(self) -> None:
        """Held-out figures at this step, kept in the record; once per step, also where a finished run is run again."""
        if self.history and self.history[-1]["step"] == self.step:
            return
        texts: list[Text] = self.heldout.texts
        result = evaluate(self.drafter(), self.heldout, texts).as_dict()
        self.history.append({"step": self.step, "seconds": round(self.seconds, 1), **result})
        self.report(self.history[-1])

    def save(self) -> None:
        """Write the checkpoint."""
        state = {"identity": self.identity(), "step": self.step, "seconds": self.seconds, "history": self.history}
        save_checkpoint(self.checkpoint, self.model, self.optimiser, state)

    def finish(self) -> dict[str, Any]:
        """Write the drafter's folder and the record."""
        save_dflash_model(self.model, self.config, self.work / "drafter")
        record = {"schema": "treebudget.training", "version": 1, "settings": asdict(self.settings), "start": self.start_name,
                  "steps": self.step, "training_seconds": round(self.seconds, 1), "num_texts": len(self.texts),
                  "num_target_tokens": sum(t.num_tokens - t.num_prompt_tokens for t in self.texts),
                  "parameters": sum(p.numel() for p in self.model.parameters()), "history": self.history}
        write_atomic(self.work / "drafter" / "record.json", json.dumps(record, indent=2) + "\n")
        return record
