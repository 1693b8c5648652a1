"""On-policy text for the drafter: batched greedy continuations by the target, with everything training needs.

One forward per step serves many prompts. Keys and values live in a preallocated buffer with one row of slots per
prompt, so nothing grows and nothing is copied; a prompt that ends hands its row to the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from decoder.sampling import greedy_ids
from decoder.target import Target


class RowsLayer(DynamicLayer):
    """Keys and values of one layer for many prompts at once, each row with a length of its own."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Allocate (num_rows, heads, capacity, head width) once, in the dtype of the first keys."""
        shape = (self.rows.num_rows, key_states.shape[1], self.rows.capacity, key_states.shape[-1])
        self.keys = torch.zeros(shape, dtype=key_states.dtype, device=key_states.device)
        self.values = torch.zeros_like(self.keys)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a prompt into one row (prefill) or one token into every row (step), and return what to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        assert self.keys is not None and self.values is not None
        rows = self.rows
        if rows.prefill_row is not None:
            self.keys[rows.prefill_row, :, : key_states.shape[2]] = key_states[0]
            self.values[rows.prefill_row, :, : key_states.shape[2]] = value_states[0]
            return key_states, value_states
        self.keys[rows.index, :, rows.positions] = key_states[:, :, 0]
        self.values[rows.index, :, rows.positions] = value_states[:, :, 0]
        return self.keys[:, :, : rows.visible], self.values[:, :, : rows.visible]

    def get_seq_length(self) -> int:
        """Always 0: masks and positions are passed in, never derived from the cache."""
        return 0


class Rows:
    """State shared by the layers of one batched cache: which row is filled, where the next token of each goes."""

    def __init__(self, num_rows: int, capacity: int, device: torch.device) -> None:
        self.num_rows, self.capacity = num_rows, capacity
        self.index = torch.arange(num_rows, device=device)
        self.positions = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.visible = 1
        self.prefill_row: int | None = None


@dataclass
class Job:
    """One prompt to continue: `free_tokens` are sampled first, so that one prompt gives several distinct texts."""

    key: str
    prompt_ids: list[int]
    free_tokens: int = 0


@dataclass
class Continuation:
    """A finished text with what the drafter trains on.

    `token_ids` (L,), `hidden` (L, features) the target's hidden states at the chosen layers, concatenated,
    `label_ids` and `label_logprobs` (L - num_prompt_tokens + 1, K): the target's top-K for the token after position
    num_prompt_tokens - 1 + i.
    """

    key: str
    num_prompt_tokens: int
    free_tokens: int
    token_ids: list[int]
    hidden: list[torch.Tensor] = field(default_factory=list)
    label_ids: list[torch.Tensor] = field(default_factory=list)
    label_logprobs: list[torch.Tensor] = field(default_factory=list)


class BatchedGenerator:
    """Greedy continuations of many prompts through one target, `num_rows` at a time."""

    def __init__(self, target: Target, feature_layers: Sequence[int], *, max_new_tokens: int, num_rows: int = 96,
                 num_labels: int = 16, temperature: float = 0.8, seed: int = 0) -> None:
        target.set_feature_layers(feature_layers)
        self.target, self.stop_ids = target, target.stop_ids
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.num_labels = min(num_labels, target.embed.shape[0])
        self.num_rows = num_rows
        self.random = torch.Generator().manual_seed(seed)

    def _prepare(self, jobs: list[Job]) -> None:
        longest = max(len(job.prompt_ids) for job in jobs)
        num_rows = min(self.num_rows, len(jobs))
        self.rows = Rows(num_rows, longest + self.max_new_tokens, self.target.device)
        self.cache = Cache(layers=[RowsLayer(self.rows) for _ in self.target.layers])
        self.active: list[Continuation | None] = [None] * num_rows
        self.next_ids = torch.zeros(num_rows, dtype=torch.long, device=self.target.device)

    @torch.inference_mode()
    def run(self, jobs: list[Job]) -> Iterator[Continuation]:
        """Yield every job's continuation as it finishes; prompts of like length share the batch.

        Raises ContextError, before anything runs, for a prompt that the target's context does not hold with its new tokens.
        """
        if not jobs:
            return
        for job in jobs:
            self.target.check_context(len(job.prompt_ids), self.max_new_tokens, f"prompt {job.key}: ")
        self._prepare(jobs)
        waiting = sorted(jobs, key=lambda job: len(job.prompt_ids), reverse=True)
        while waiting or any(self.active):
            for row, text in enumerate(self.active):
                if text is None and waiting:
                    yield from self._start(row, waiting.pop())
            if any(self.active):
                yield from self._step()

    def _start(self, row: int, job: Job) -> Iterator[Continuation]:
        ids = torch.tensor([job.prompt_ids], device=self.target.device)
        self.rows.prefill_row = row
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        hidden, features = self.target.run_decoder(ids, positions, mask, self.cache)
        self.rows.prefill_row = None
        text = Continuation(job.key, ids.shape[1], job.free_tokens, list(job.prompt_ids))
        if features is not None:
            text.hidden.append(features[0].cpu())
        self.active[row] = text
        self.rows.positions[row] = ids.shape[1]
        yield from self._emit([row], self.target.head(hidden[:, -1]))

    def _step(self) -> Iterator[Continuation]:
        rows = self.rows
        live = [row for row, text in enumerate(self.active) if text is not None]
        rows.visible = min(rows.capacity, -(-(int(rows.positions[live].max()) + 1) // 32) * 32)
        mask = torch.arange(rows.visible, device=rows.positions.device)[None] <= rows.positions[:, None]
        hidden, features = self.target.run_decoder(self.next_ids[:, None], rows.positions[:, None], mask[:, None, None],
                                                   self.cache)
        if features is not None:
            kept = features.cpu()
            for row in live:
                self.active[row].hidden.append(kept[row])  # type: ignore[union-attr]
        rows.positions[live] += 1
        yield from self._emit(live, self.target.head(hidden[live, 0]))

    def _emit(self, live: list[int], logits: torch.Tensor) -> Iterator[Continuation]:
        logits = logits.float()
        top, top_ids = logits.topk(self.num_labels, dim=-1)
        logprobs = (top - logits.logsumexp(-1, keepdim=True)).to("cpu", torch.float16)
        labels = top_ids.to("cpu", torch.int32)
        greedy = greedy_ids(logits)
        for i, row in enumerate(live):
            text = self.active[row]
            assert text is not None
            text.label_ids.append(labels[i])
            text.label_logprobs.append(logprobs[i])
            num_new = len(text.token_ids) - text.num_prompt_tokens
            if num_new < text.free_tokens:
                probs = torch.softmax(top[i].cpu() / self.temperature, -1)
                token = int(labels[i, torch.multinomial(probs, 1, generator=self.random)])
            else:
                token = int(greedy[i])
            text.token_ids.append(token)
            self.next_ids[row] = token
            if token in self.stop_ids or num_new + 1 >= self.max_new_tokens:
                self.active[row] = None
                yield text
