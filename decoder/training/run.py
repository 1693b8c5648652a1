"""`decoder train` from end to end: split the prompts, let the target write, train, ship the drafter with its record."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoder.batched import BatchedGenerator, Job
from decoder.target import Target
from decoder.training.corpus import Corpus
from decoder.training.errors import TrainingError
from decoder.training.start import config_for_target, start_from_target
from decoder.training.train import Report, Trainer, TrainSettings

SHARD_TEXTS = 8


@dataclass(frozen=True)
class CorpusSettings:
    """What the target writes. Every pass over the prompts after the first begins with a few sampled tokens.

    Every `heldout_every`-th prompt is kept from the drafter, for evaluation here and for tuning a selector later;
    `num_heldout` of them are used for evaluation while training.
    """

    passes: int = 2
    max_new_tokens: int = 256
    max_prompt_tokens: int = 500
    heldout_every: int = 6
    num_heldout: int = 32
    heldout_tokens: int = 128
    num_rows: int = 96
    max_free_tokens: int = 60
    seed: int = 0


@dataclass(frozen=True)
class DrafterShape:
    """The drafter to train. `mask_token_id` should be a token that texts do not contain."""

    num_layers: int = 2
    block_size: int = 8
    mask_token_id: int = 16
    num_features: int = 5


@dataclass(frozen=True)
class TrainingRun:
    """Everything `decoder train` needs besides the loaded target and the tokenised prompts."""

    work: Path
    shape: DrafterShape = field(default_factory=DrafterShape)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    training: TrainSettings = field(default_factory=TrainSettings)


def split_prompts(prompts: Sequence[Sequence[int]], settings: CorpusSettings) -> tuple[list[int], list[int]]:
    """Indices of prompts to train on and of those held out."""
    fitting = [i for i, ids in enumerate(prompts) if len(ids) <= settings.max_prompt_tokens]
    heldout = [i for i in fitting if i % settings.heldout_every == settings.heldout_every - 1]
    train = [i for i in fitting if i % settings.heldout_every != settings.heldout_every - 1]
    if not train or not heldout:
        raise TrainingError(f"{len(prompts)} prompts leave {len(train)} to train on and {len(heldout)} held out",
                            hint=f"give at least {settings.heldout_every} prompts of at most {settings.max_prompt_tokens} tokens")
    return train, heldout


def corpus_jobs(prompts: Sequence[Sequence[int]], indices: Sequence[int], settings: CorpusSettings) -> list[Job]:
    """One job per pass and prompt; the first pass is greedy from the first token on."""
    draw = random.Random(settings.seed)
    jobs = []
    for number in range(settings.passes):
        for index in indices:
            free = 0 if number == 0 else draw.randint(3, settings.max_free_tokens)
            jobs.append(Job(f"{number}-{index}", list(prompts[index]), free))
    return jobs


def write_corpus(target: Target, feature_layers: Sequence[int], jobs: list[Job], corpus: Corpus, *, max_new_tokens: int,
                 num_rows: int, report: Report) -> None:
    """Let the target continue what is not in the corpus yet, shard by shard."""
    done = corpus.keys()
    missing = [job for job in jobs if job.key not in done]
    generator = BatchedGenerator(target, feature_layers, max_new_tokens=max_new_tokens, num_rows=num_rows, seed=len(done))
    waiting = []
    for text in generator.run(missing):
        waiting.append(text)
        if len(waiting) >= SHARD_TEXTS:
            corpus.append(waiting)
            waiting = []
            report({"texts": len(corpus.texts), "of": len(jobs)})
    if waiting:
        corpus.append(waiting)
    report({"texts": len(corpus.texts), "of": len(jobs)})


def run_training(run: TrainingRun, target: Target, prompts: Sequence[Sequence[int]], report: Report) -> dict[str, Any]:
    """Generate, train and write `work`/drafter; returns the training record. Every stage resumes after a kill."""
    config = config_for_target(target.model.config, num_layers=run.shape.num_layers, block_size=run.shape.block_size,
                               mask_token_id=run.shape.mask_token_id, num_features=run.shape.num_features)
    digest = hashlib.sha256(json.dumps([list(map(int, ids)) for ids in prompts]).encode()).hexdigest()
    identity = {"target": target.name, "feature_layers": list(config.target_layer_ids),
                "dtype": str(target.dtype).removeprefix("torch."), "prompts_sha256": digest}
    train, heldout = split_prompts(prompts, run.corpus)
    corpus = Corpus(run.work / "corpus", identity)
    write_corpus(target, config.target_layer_ids, corpus_jobs(prompts, train, run.corpus), corpus,
                 max_new_tokens=run.corpus.max_new_tokens, num_rows=run.corpus.num_rows, report=report)
    unseen = Corpus(run.work / "heldout", identity)
    stride = max(1, len(heldout) // run.corpus.num_heldout)
    jobs = [Job(f"h-{i}", list(prompts[i])) for i in heldout[::stride][: run.corpus.num_heldout]]
    write_corpus(target, config.target_layer_ids, jobs, unseen, max_new_tokens=run.corpus.heldout_tokens,
                 num_rows=min(32, run.corpus.num_rows), report=report)
    target.set_feature_layers(())
    trainer = Trainer(config, target.model, corpus, unseen, run.training, run.work,
                      start=lambda model: start_from_target(model, target.model), report=report)
    record = trainer.run()
    record["heldout_prompts"] = heldout
    return record
