"""Training: the corpus resumes, a run that was cut goes on to the same weights, and a drafter learns what can be learned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from decoder.cli import main
from decoder.drafters.dflash import DFlashDrafter
from decoder.errors import UsageError
from decoder.seen import PromptsSeen, prompt_sha256
from decoder.target import Target
from decoder.training.batches import make_batch, root_weights
from decoder.training.corpus import Corpus
from decoder.training.errors import TrainingError
from decoder.training.evaluate import chain_replay
from decoder.training.loss import position_weights
from decoder.training.run import CorpusSettings, DrafterShape, TrainingRun, corpus_jobs, run_training, split_prompts, write_corpus
from decoder.training.train import Trainer, TrainSettings
from tests.decoder.helpers import save_tiny_target, tiny_model

SHAPE = DrafterShape(num_layers=1, block_size=4, mask_token_id=60, num_features=2)
CORPUS = CorpusSettings(passes=2, max_new_tokens=24, num_heldout=4, heldout_tokens=24, num_rows=8, max_free_tokens=6)
SETTINGS = TrainSettings(steps=6, texts_per_step=2, roots_per_text=6, warmup_steps=2, evaluate_every=100, checkpoint_every=1,
                         frequent_tokens=40, random_tokens=8)


def bfloat16_target() -> Target:
    return Target(tiny_model(layers=6, scale=0.2).to(torch.bfloat16), name="tiny")


def prompts(count: int = 24) -> list[list[int]]:
    random = np.random.default_rng(4)
    return [random.integers(0, 59, 5).tolist() for _ in range(count)]


def test_chain_replay_worked_example() -> None:
    # Root 0: two right, so three tokens; root 3: none right, one token; root 4: one right, cut to the text's end.
    right = np.array([[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=bool)
    assert chain_replay(right) == (3, 5)


def test_heldout_prompts_are_every_sixth_and_never_trained_on() -> None:
    train, heldout = split_prompts(prompts(), CORPUS)
    assert heldout == [5, 11, 17, 23] and not set(train) & set(heldout)
    keys = {job.key.split("-")[1] for job in corpus_jobs(prompts(), train, CORPUS)}
    assert keys == {str(i) for i in train}
    with pytest.raises(TrainingError, match="held out"):
        split_prompts(prompts(3), CORPUS)


def test_corpus_goes_on_where_it_was_cut_and_refuses_another_target(tmp_path: Path) -> None:
    target, identity = bfloat16_target(), {"target": "tiny"}
    train, _ = split_prompts(prompts(), CORPUS)
    jobs = corpus_jobs(prompts(), train, CORPUS)
    write_corpus(target, (1, 3), jobs[:17], Corpus(tmp_path, identity), max_new_tokens=8, num_rows=4, report=lambda line: None)
    (tmp_path / "torn.tmp").write_bytes(b"half a shard")  # what a kill in the middle of a write leaves
    corpus = Corpus(tmp_path, identity)
    assert len(corpus.texts) == 17
    write_corpus(target, (1, 3), jobs, corpus, max_new_tokens=8, num_rows=4, report=lambda line: None)
    assert Corpus(tmp_path, identity).keys() == {job.key for job in jobs}
    with pytest.raises(TrainingError, match="target is 'tiny', this run has 'other'"):
        Corpus(tmp_path, {"target": "other"})


def test_batches_label_what_follows_the_root(tmp_path: Path) -> None:
    target = bfloat16_target()
    corpus = Corpus(tmp_path, {"target": "tiny"})
    jobs = corpus_jobs(prompts(), list(range(6)), CORPUS)
    write_corpus(target, (1, 3), jobs, corpus, max_new_tokens=12, num_rows=4, report=lambda line: None)
    texts = corpus.texts[:3]
    batch = make_batch(corpus, texts, 5, 4, 0.5, np.random.default_rng(0))
    for i, text in enumerate(texts):
        row = corpus.load(text)
        assert (root_weights(row, 0.5) >= 0.5).all() and len(root_weights(row, 0.5)) == text.num_roots
        for j, anchor in enumerate(batch.anchors[i].tolist()):
            assert text.first_root <= anchor < text.num_tokens - 1
            assert batch.roots[i, j] == row.token_ids[anchor]
            for k in range(3):
                place = anchor + 1 + k
                assert bool(batch.valid[i, j, k]) == (place < text.num_tokens)
                if place < text.num_tokens:
                    assert batch.hard[i, j, k] == row.token_ids[place]
                    probs, likely = batch.soft_probs[i, j, k], batch.soft_ids[i, j, k] == batch.hard[i, j, k]
                    assert probs[likely].item() == probs.max()  # greedy: the target's token is a top label, alone or with others


def test_position_weights_fall_by_e_over_the_decay() -> None:
    weights = position_weights(8, 4.0)
    assert weights.shape == (7,) and weights[0] == 1.0
    assert weights[4] == pytest.approx(np.exp(-1.0))


def make_trainer(work: Path, settings: TrainSettings) -> Trainer:
    target = bfloat16_target()
    run = TrainingRun(work=work, shape=SHAPE, corpus=CORPUS, training=settings)
    from decoder.training.start import config_for_target, start_from_target

    config = config_for_target(target.model.config, num_layers=1, block_size=4, mask_token_id=60, num_features=2)
    train, heldout = split_prompts(prompts(), run.corpus)
    corpora = []
    for name, indices in (("corpus", train), ("heldout", heldout)):
        corpus = Corpus(work / name, {"target": "tiny"})
        write_corpus(target, config.target_layer_ids, corpus_jobs(prompts(), indices, CORPUS), corpus, max_new_tokens=16,
                     num_rows=8, report=lambda line: None)
        corpora.append(corpus)
    return Trainer(config, target.model, *corpora, settings, work, start=lambda model: start_from_target(model, target.model))


def test_a_run_that_was_cut_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", SETTINGS)
    whole.run()
    cut = make_trainer(tmp_path / "cut", SETTINGS)
    for _ in range(3):  # dies behind its third checkpoint
        cut.train_step()
        cut.step += 1
    cut.save()
    resumed = make_trainer(tmp_path / "cut", SETTINGS)
    assert resumed.step == 3
    resumed.run()
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    with pytest.raises(TrainingError, match="seed"):
        make_trainer(tmp_path / "cut", replace(SETTINGS, seed=9))


def test_training_end_to_end_learns_and_ships_a_drafter_that_loads(tmp_path: Path) -> None:
    target = bfloat16_target()
    settings = replace(SETTINGS, steps=120, learning_rate=3e-3, evaluate_every=1000, checkpoint_every=1000)
    lines: list[dict] = []
    record = run_training(TrainingRun(tmp_path, SHAPE, CORPUS, settings), target, prompts(), lines.append)
    assert record["heldout_prompts"] == [5, 11, 17, 23] and record["steps"] == 120
    assert json.loads((tmp_path / "drafter" / "record.json").read_text())["schema"] == "treebudget.training"
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.3
    drafter = DFlashDrafter.load(tmp_path / "drafter", target.embed, target.head)
    assert drafter.block_size == 4 and drafter.feature_layers == (1, 3)
    seen = PromptsSeen.load(tmp_path / "drafter")
    assert seen is not None and seen.is_complete
    for i, ids in enumerate(prompts()):
        assert (prompt_sha256(ids) in seen.digests) == (i % 6 != 5)


def test_training_starts_from_a_drafter_and_remembers_what_that_one_saw(tmp_path: Path) -> None:
    target, first = bfloat16_target(), tmp_path / "first"
    run_training(TrainingRun(first, SHAPE, CORPUS, SETTINGS), target, prompts(), lambda line: None)
    more = [[60 - token for token in ids] for ids in prompts()]
    still = replace(SETTINGS, steps=1, learning_rate=0.0)  # one step at rate 0: the weights that it began with
    run = TrainingRun(tmp_path / "second", DrafterShape(num_layers=3), CORPUS, still, first / "drafter")
    record = run_training(run, target, more, lambda line: None)
    assert record["start"] == str((first / "drafter").resolve())
    ours, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (tmp_path / "second", first))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    seen = PromptsSeen.load(tmp_path / "second" / "drafter")
    assert seen is not None and seen.is_complete
    both = [*prompts(), *more]
    assert seen.count(prompt_sha256(ids) for ids in both) == 40 and len(seen.digests) == 40
    (first / "drafter" / "prompts_seen.json").unlink()
    run_training(replace(run, work=tmp_path / "third"), target, more, lambda line: None)
    unknown = PromptsSeen.load(tmp_path / "third" / "drafter")
    assert unknown is not None and not unknown.is_complete and unknown.count([prompt_sha256(prompts()[0])]) is None


def test_a_checkpoint_of_another_start_and_a_drafter_of_another_target_are_refused(tmp_path: Path) -> None:
    target, first = bfloat16_target(), tmp_path / "first"
    run_training(TrainingRun(first, SHAPE, CORPUS, SETTINGS), target, prompts(), lambda line: None)
    with pytest.raises(TrainingError, match="start"):
        run_training(TrainingRun(first, SHAPE, CORPUS, SETTINGS, first / "drafter"), target, prompts(), lambda line: None)
    other = Target(tiny_model(layers=2, scale=0.2).to(torch.bfloat16), name="other")
    with pytest.raises(TrainingError, match="reads target layers"):
        run_training(TrainingRun(tmp_path / "x", SHAPE, CORPUS, SETTINGS, first / "drafter"), other, prompts(), lambda line: None)


def test_prompts_left_out_by_another_rule_are_not_evaluated_on_what_was_trained_on(tmp_path: Path) -> None:
    train, heldout = split_prompts(prompts(), replace(CORPUS, heldout_every=4, heldout_rest=1))
    assert heldout == [1, 5, 9, 13, 17, 21] and len(train) == 18
    target = bfloat16_target()
    run_training(TrainingRun(tmp_path, SHAPE, CORPUS, SETTINGS), target, prompts(), lambda line: None)
    rule = replace(CORPUS, heldout_rest=4)
    with pytest.raises(TrainingError, match="held out, first of 4"):
        run_training(TrainingRun(tmp_path, SHAPE, rule, SETTINGS), target, prompts(), lambda line: None)


def test_train_command_leaves_out_and_starts_from(tmp_path: Path) -> None:
    folder, file = save_tiny_target(tmp_path / "tiny"), tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "say {letter}"}}\n' for letter in "abcdefgh"))
    arguments = ["train", "--target", folder, "--prompts", str(file), "--leave-out", "4:1", "--passes", "1", "--steps", "1",
                 "--max-new-tokens", "16", "-q", "--work"]
    shape = ["--layers", "1", "--block-size", "4", "--mask-token", "60"]
    made = CliRunner().invoke(main, [*arguments, str(tmp_path / "a"), *shape, "--json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["heldout_prompts"] == [1, 5]
    seen = PromptsSeen.load(tmp_path / "a" / "drafter")
    assert seen is not None and len(seen.digests) == 6
    again = [*arguments, str(tmp_path / "b"), "--start-from", str(tmp_path / "a" / "drafter")]
    refused = CliRunner().invoke(main, [*again, "--layers", "1"])
    assert refused.exit_code == 2 and "--layers cannot be chosen with --start-from" in refused.stderr
    for wrong in (["--leave-out", "4"], ["--minutes", "0"], ["--minutes", "-1"]):
        assert CliRunner().invoke(main, [*again, *wrong]).exit_code == 2
    assert CliRunner().invoke(main, again).exit_code == 0
    assert json.loads((tmp_path / "b" / "drafter" / "config.json").read_text())["num_hidden_layers"] == 1


def test_what_an_earlier_run_wrote_otherwise_is_refused_or_left_alone(tmp_path: Path) -> None:
    target = bfloat16_target()
    run = TrainingRun(tmp_path, SHAPE, CORPUS, SETTINGS)
    record = run_training(run, target, prompts(), lambda line: None)
    assert record["num_texts"] == 40
    again = run_training(run, target, prompts(), lambda line: None)
    assert again["history"] == record["history"] and again["steps"] == 6  # nothing is counted or evaluated twice
    with pytest.raises(TrainingError, match="max_new_tokens is 24, this run has 30"):
        run_training(replace(run, corpus=replace(CORPUS, max_new_tokens=30)), target, prompts(), lambda line: None)
    with pytest.raises(TrainingError, match="6 steps behind it, more than 3"):
        run_training(replace(run, training=replace(SETTINGS, steps=3)), target, prompts(), lambda line: None)
    fewer = replace(run, corpus=replace(CORPUS, passes=1), training=replace(SETTINGS, steps=7))
    assert run_training(fewer, target, prompts(), lambda line: None)["num_texts"] == 20
    other = Target(tiny_model(layers=6, scale=0.2, seed=1).to(torch.bfloat16), name="tiny")
    with pytest.raises(TrainingError, match="target_sha256"):
        run_training(run, other, prompts(), lambda line: None)
    checkpoint = tmp_path / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:200])
    with pytest.raises(TrainingError, match="checkpoint.safetensors cannot be used"):
        run_training(run, target, prompts(), lambda line: None)
    shard = next((tmp_path / "corpus").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(TrainingError, match="delete it|cannot be read"):
        run_training(run, target, prompts(), lambda line: None)


@pytest.mark.parametrize(("shape", "said"), [
    ({"num_layers": 9}, "1 to 6 layers"), ({"mask_token_id": 61}, "mask token from 0 to 60"), ({"block_size": 1}, "at least 2"),
    ({"block_size": 40}, "0 of 40 texts hold a block of 40"),
])
def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, shape: dict, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        run = TrainingRun(tmp_path, replace(SHAPE, **shape), CORPUS, SETTINGS)
        run_training(run, bfloat16_target(), prompts(), lambda line: None)


def test_positions_that_no_held_out_text_reaches_are_unknown_and_small_targets_have_features(tmp_path: Path) -> None:
    target = Target(tiny_model(layers=2, scale=0.2).to(torch.bfloat16), name="tiny")
    corpus = replace(CORPUS, heldout_tokens=3)
    run = TrainingRun(tmp_path, replace(SHAPE, block_size=8, num_features=5), corpus, replace(SETTINGS, steps=1))
    record = run_training(run, target, prompts(), lambda line: None)
    assert record["history"][-1]["accuracy"][2:] == [None] * 5
    json.loads((tmp_path / "drafter" / "record.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert set(config["dflash_config"]["target_layer_ids"]) <= {0, 1}
    for wrong in ({"minutes": float("nan")}, {"minutes": float("inf")}, {"steps": 0}):
        with pytest.raises(UsageError, match="number of steps or minutes"):
            TrainSettings(**wrong)


def test_a_target_whose_weights_cannot_be_read_is_refused(tmp_path: Path) -> None:
    target = bfloat16_target()
    target.linear = "prepacked"
    with pytest.raises(TrainingError, match="linear layers are prepacked"):
        run_training(TrainingRun(tmp_path, SHAPE, CORPUS, SETTINGS), target, prompts(), lambda line: None)
