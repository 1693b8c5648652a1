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
from decoder.drafters.dflash import load_dflash_model
from decoder.drafters.dflash_config import DFlashConfig
from decoder.drafters.dflash_model import DFlashModel
from decoder.seen import PromptsSeen
from decoder.target import Target
from decoder.training.corpus import Corpus
from decoder.training.errors import TrainingError
from decoder.training.start import config_for_target, start_from_target
from decoder.training.train import Report, Trainer, TrainSettings

SHARD_TEXTS = 8


@dataclass(frozen=True)
class CorpusSettings:
    """What the target writes. Every pass over the prompts after the first begins with a few sampled tokens.

    Prompts i with i % heldout_every == heldout_rest are kept from the drafter, for evaluation here and for tuning a
    selector later; `num_heldout` of them are used for evaluation while training.
    """

    passes: int = 2
    max_new_tokens: int = 256
    max_prompt_tokens: int = 500
    heldout_every: int = 6
    heldout_rest: int = 5
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
    """Everything `decoder train` needs besides the loaded target and the tokenised prompts.

    `start_from` is the folder of a drafter whose shape and weights training starts from; `shape` is then not used.
    """

    work: Path
    shape: DrafterShape = field(default_factory=DrafterShape)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    training: TrainSettings = field(default_factory=TrainSettings)
    start_from: Path | None = None


def split_prompts(prompts: Sequence[Sequence[int]], settings: CorpusSettings) -> tuple[list[int], list[int]]:
    """Indices of prompts to train on and of those held out."""
    fitting = [i for i, ids in enumerate(prompts) if len(ids) <= settings.max_prompt_tokens]
    heldout = [i for i in fitting if i % settings.heldout_every == settings.heldout_rest]
    train = [i for i in fitting if i % settings.heldout_every != settings.heldout_rest]
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


def starting_config(run: TrainingRun, target: Target) -> DFlashConfig:
    """The shape of the drafter to train: that of `start_from` where given; TrainingError if it does not fit the target."""
    if run.start_from is None:
        vocab, layers = target.embed.shape[0], len(target.layers)
        if not (0 <= run.shape.mask_token_id < vocab and 1 <= run.shape.num_layers <= layers and run.shape.block_size >= 2):
            raise TrainingError(f"a drafter of this target has 1 to {layers} layers, a block size of at least 2 and a mask token "
                                f"from 0 to {vocab - 1}; asked for are {run.shape.num_layers}, {run.shape.block_size} and "
                                f"{run.shape.mask_token_id}")
        return config_for_target(target.model.config, num_layers=run.shape.num_layers, block_size=run.shape.block_size,
                                 mask_token_id=run.shape.mask_token_id, num_features=run.shape.num_features)
    config, shape = DFlashConfig.load(run.start_from), target.shape
    hidden = config.raw.get("hidden_size")
    if hidden != shape["hidden"] or max(config.target_layer_ids) >= shape["layers"]:
        raise TrainingError(f"drafter {run.start_from} has hidden size {hidden} and reads target layers "
                            f"{list(config.target_layer_ids)}; the target has {shape['hidden']} and {shape['layers']} layers",
                            hint="start from a drafter of this target, or without --start-from")
    return config


def start_from_drafter(model: DFlashModel, folder: Path) -> None:
    """Copy the weights of a drafter of the same shape; DrafterError names what is missing."""
    model.load_state_dict(load_dflash_model(folder).state_dict())


def run_training(run: TrainingRun, target: Target, prompts: Sequence[Sequence[int]], report: Report) -> dict[str, Any]:
    """Generate, train and write `work`/drafter; returns the training record. Every stage resumes after a kill.

    Beside the drafter lies prompts_seen.json: the digests of the prompts it was trained on, `start_from`'s included.
    """
    if target.linear != "default":
        raise TrainingError(f"the target's linear layers are {target.linear}, which hides the weights that training reads",
                            hint="load it with linear layers in their default form (--linear default)")
    config = starting_config(run, target)
    digest = hashlib.sha256(json.dumps([list(map(int, ids)) for ids in prompts]).encode()).hexdigest()
    identity = {"target": target.name, "target_sha256": target.weights_sha256, "feature_layers": list(config.target_layer_ids),
                "dtype": str(target.dtype).removeprefix("torch."), "prompts_sha256": digest}
    split = split_prompts(prompts, run.corpus)
    corpus, unseen = write_corpora(run, target, config.target_layer_ids, prompts, split, identity, report)
    seen = PromptsSeen.of(prompts[i] for i in trained_indices(corpus, split[1]))
    if run.start_from is not None:
        seen = seen.after(PromptsSeen.load(run.start_from))
    target.set_feature_layers(())

    def start(model: DFlashModel) -> None:
        if run.start_from is None:
            start_from_target(model, target.model)
        else:
            start_from_drafter(model, run.start_from)

    trainer = Trainer(config, target.model, corpus, unseen, run.training, run.work, start=start, report=report,
                      start_name=None if run.start_from is None else str(run.start_from.resolve()))
    record = trainer.run()
    seen.save(run.work / "drafter")
    record["heldout_prompts"] = split[1]
    return record


def trained_indices(corpus: Corpus, heldout: Sequence[int]) -> list[int]:
    """Prompts that texts of the corpus begin with; TrainingError if it holds one that is to be held out."""
    indices = sorted({int(text.key.split("-")[1]) for text in corpus.texts})
    leaked = sorted(set(indices) & set(heldout))
    if leaked:
        raise TrainingError(f"{corpus.folder} has texts of {len(leaked)} prompts that are to be held out, first of {leaked[0]}",
                            hint="an earlier run left out others: train in another --work folder")
    return indices


def write_corpora(run: TrainingRun, target: Target, layers: Sequence[int], prompts: Sequence[Sequence[int]],
                  split: tuple[list[int], list[int]], identity: dict[str, Any], report: Report) -> tuple[Corpus, Corpus]:
    """The texts to train on and those to evaluate on, written as far as they are not there yet."""
    train, heldout = split
    drawn = {"seed": run.corpus.seed, "max_free_tokens": run.corpus.max_free_tokens}
    corpus = Corpus(run.work / "corpus", identity | drawn | {"max_new_tokens": run.corpus.max_new_tokens})
    trained_indices(corpus, heldout)  # refuses a folder that left out others before anything is added to it
    jobs = corpus_jobs(prompts, train, run.corpus)
    write_corpus(target, layers, jobs, corpus, max_new_tokens=run.corpus.max_new_tokens, num_rows=run.corpus.num_rows,
                 report=report)
    corpus.keep({job.key for job in jobs})  # an earlier run may have made more passes
    unseen = Corpus(run.work / "heldout", identity | {"max_new_tokens": run.corpus.heldout_tokens})
    stride = max(1, len(heldout) // run.corpus.num_heldout)
    jobs = [Job(f"h-{i}", list(prompts[i])) for i in heldout[::stride][: run.corpus.num_heldout]]
    write_corpus(target, layers, jobs, unseen, max_new_tokens=run.corpus.heldout_tokens,
                 num_rows=min(32, run.corpus.num_rows), report=report)
    unseen.keep({job.key for job in jobs})
    return corpus, unseen
