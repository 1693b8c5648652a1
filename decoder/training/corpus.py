"""The training corpus: the target's own texts with hidden states and soft labels, written shard by shard as they come."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from decoder.batched import Continuation
from decoder.training.errors import TrainingError

SCHEMA, VERSION = "treebudget.corpus", 1


@dataclass(frozen=True)
class Text:
    """One text of the corpus, its arrays still on disk.

    `num_tokens` is prompt and continuation; the first `free_tokens` of the continuation were sampled, the rest is greedy.
    """

    key: str
    shard: Path
    num_tokens: int
    num_prompt_tokens: int
    free_tokens: int

    @property
    def first_root(self) -> int:
        """First position whose successor the target chose greedily."""
        return self.num_prompt_tokens + max(self.free_tokens - 1, 0)

    @property
    def num_roots(self) -> int:
        """Positions that can be the root of a block with at least one known successor."""
        return max(self.num_tokens - 1 - self.first_root, 0)


@dataclass
class TextArrays:
    """A text in memory: `token_ids` (L,), `hidden` (L, F), `label_ids` and `label_logprobs` (L - prompt, K)."""

    text: Text
    token_ids: torch.Tensor
    hidden: torch.Tensor
    label_ids: torch.Tensor
    label_logprobs: torch.Tensor


class Corpus:
    """A folder of safetensors shards. Every shard is written whole, so a kill loses only texts not yet written."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.identity = Path(folder), identity
        self.texts: list[Text] = []
        self._open: dict[Path, Any] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            self._index(path)

    def _index(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as shard:
                meta = shard.metadata() or {}
        except SafetensorError as error:
            raise TrainingError(f"{path} cannot be read: {error}", hint="delete it: its texts are written again") from error
        if meta.get("schema") != SCHEMA:
            raise TrainingError(f"{path}: field schema is {meta.get('schema')!r}, expected {SCHEMA!r}")
        found = json.loads(meta["identity"])
        for name, expected in self.identity.items():
            if found.get(name) != expected:
                raise TrainingError(f"{path}: field {name} is {found.get(name)!r}, this run has {expected!r}",
                                    hint="train in another --work folder or remove the old corpus")
        self.texts += [Text(row["key"], path, row["tokens"], row["prompt"], row["free"]) for row in json.loads(meta["texts"])]

    def keys(self) -> set[str]:
        """Names of the texts already there."""
        return {text.key for text in self.texts}

    def keep(self, keys: set[str]) -> None:
        """Go on with the texts of these names alone; the others stay on disk."""
        self.texts = [text for text in self.texts if text.key in keys]

    def append(self, batch: list[Continuation]) -> None:
        """Write a shard of finished texts."""
        tensors, rows = {}, []
        for text in batch:
            tensors[f"{text.key}/tokens"] = torch.tensor(text.token_ids, dtype=torch.int32)
            tensors[f"{text.key}/hidden"] = torch.cat(text.hidden)
            tensors[f"{text.key}/label_ids"] = torch.stack(text.label_ids)
            tensors[f"{text.key}/label_logprobs"] = torch.stack(text.label_logprobs)
            rows.append({"key": text.key, "tokens": len(text.token_ids), "prompt": text.num_prompt_tokens,
                         "free": text.free_tokens})
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{len(list(self.folder.glob('*.safetensors'))):05d}-{batch[0].key}.safetensors"
        partial = path.with_suffix(".tmp")
        meta = {"schema": SCHEMA, "version": str(VERSION), "identity": json.dumps(self.identity), "texts": json.dumps(rows)}
        save_file(tensors, partial, metadata=meta)
        partial.replace(path)
        self._index(path)

    def load(self, text: Text) -> TextArrays:
        """Read one text's arrays (memory-mapped by safetensors)."""
        shard = self._open.get(text.shard)
        if shard is None:
            shard = self._open[text.shard] = safe_open(text.shard, "pt").__enter__()
        names = ("tokens", "hidden", "label_ids", "label_logprobs")
        return TextArrays(text, *(shard.get_tensor(f"{text.key}/{name}") for name in names))

    def frequent_tokens(self, texts: Iterable[Text], limit: int, vocab_size: int) -> torch.Tensor:
        """The `limit` tokens that the target names most often among its top four, sorted by id."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for text in texts:
            ids = self.load(text).label_ids[:, :4].flatten().long()
            counts += torch.bincount(ids, minlength=vocab_size)
        present = int((counts > 0).sum())
        return counts.argsort(descending=True)[: min(limit, present)].sort().values
