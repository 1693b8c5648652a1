"""Recording a trace: the target's text for each prompt once, and what the drafter would have proposed at every place of it.

In greedy decoding the text does not depend on the policy, so one trace replays every policy exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from decoder.batched import BatchedGenerator, Continuation, Job
from decoder.drafters.dflash import DFlashDrafter
from decoder.seen import PromptsSeen, prompt_sha256
from decoder.target import Target
from selector import Trace, TraceText, TraceWriter

ROOTS_PER_PASS = 64
DRAFTER_FIELDS = ("drafter", "drafter_sha256", "block_size")


class TracePrompt(Protocol):
    """What tracing needs of a prompt: its tokens, a stable name, and the data set it belongs to, if any."""

    key: str
    dataset: str | None
    token_ids: Sequence[int]


def trace_identity(target: Target, drafter: Any, prompts: Iterable[TracePrompt], max_new_tokens: int,
                   top_k: int) -> dict[str, Any]:
    """What a trace is a trace of. `prompts_sha256` covers the prompts' tokens, in order."""
    prompts = list(prompts)
    text = json.dumps([list(map(int, prompt.token_ids)) for prompt in prompts])
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return {
        "target": target.name,
        **({} if target.weights_sha256 is None else {"target_sha256": target.weights_sha256}),
        "dtype": str(target.dtype).removeprefix("torch."),
        **{name: value for name, value in drafter.identity().items() if name in DRAFTER_FIELDS and value is not None},
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "context_tokens": [min(lengths), max(lengths) + max_new_tokens],
        "num_prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def prompts_identity(prompts: Iterable[TracePrompt], seen: PromptsSeen | None) -> dict[str, Any]:
    """`prompt_sha256s`: 16 digits per prompt, in order; `drafter_saw`: how many the drafter was trained on, None if unknown."""
    digests = [prompt_sha256(prompt.token_ids) for prompt in prompts]
    return {"prompt_sha256s": digests, "drafter_saw": None if seen is None else seen.count(digests)}


@torch.inference_mode()
def draft_everywhere(drafter: DFlashDrafter, text: Continuation, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Top-K drafts at every root of a text: token ids (A, depth, K) int32 and log-probabilities (A, depth, K) float32.

    Root a stands at position num_prompt_tokens + a. Normalised over the whole vocabulary.
    """
    top_k = min(top_k, len(drafter.embedding))
    features = torch.cat(text.hidden).to(drafter.embedding)
    token_ids = torch.tensor(text.token_ids, device=features.device)
    anchors = torch.arange(text.num_prompt_tokens, len(text.token_ids), device=features.device)
    ids, logprobs = [], []
    for part in anchors.split(ROOTS_PER_PASS):
        hidden = drafter.draft_hidden_at(features, token_ids, part)
        logits = drafter.model.logits(hidden.flatten(0, 1), drafter.head)
        top = logits.topk(top_k, dim=-1)
        shape = (len(part), drafter.block_size - 1, top_k)
        ids.append(top.indices.to("cpu", torch.int32).view(shape).numpy())
        logprobs.append((top.values - logits.logsumexp(-1, keepdim=True)).cpu().view(shape).numpy())
    return np.concatenate(ids), np.concatenate(logprobs).astype(np.float32)


def target_rows(text: Continuation) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """The target's own best next tokens behind every root: ids (A, M) int32 and log-probabilities (A, M) float32.

    Label i of a continuation is about the token at position num_prompt_tokens + i, so root a, which stands there, goes with
    label a + 1. Behind the last root the target was never asked: its row is padded (-1, -inf). None without labels.
    """
    if not text.label_ids:
        return None, None
    pad = torch.full_like(text.label_ids[0], -1), torch.full_like(text.label_logprobs[0], -torch.inf)
    ids, logprobs = torch.stack([*text.label_ids[1:], pad[0]]), torch.stack([*text.label_logprobs[1:], pad[1]])
    return ids.to(torch.int32).numpy(), logprobs.float().numpy()


def traced_text(drafter: DFlashDrafter, text: Continuation, top_k: int, dataset: str | None) -> TraceText:
    """One text of a trace from the target's text, features and, where the continuation has them, labels."""
    ids, logprobs = draft_everywhere(drafter, text, top_k)
    target_ids, target_logprobs = target_rows(text)
    return TraceText(key=text.key, dataset=dataset, num_prompt_tokens=text.num_prompt_tokens,
                     token_ids=np.array(text.token_ids, dtype=np.int32), draft_token_ids=ids, draft_logprobs=logprobs,
                     target_token_ids=target_ids, target_logprobs=target_logprobs)


def record_trace(target: Target, drafter: DFlashDrafter, prompts: Sequence[TracePrompt], out: Path, *, max_new_tokens: int = 128,
                 top_k: int = 16, num_rows: int = 16, seen: PromptsSeen | None = None,
                 progress: Callable[[int], None] | None = None) -> Trace:
    """Generate greedily, draft everywhere, and write the trace to `out`.

    `seen` is what the drafter was trained on (`decoder.seen.prompts_seen_by`), for the record. Every finished text is
    kept beside `out` at once, so a run that was killed goes on when called again with the same arguments; what is left of a
    run with others is refused by name (TraceMismatch). `progress` gets the number of texts done.
    """
    top_k = min(top_k, target.embed.shape[0])
    writer = TraceWriter(out, trace_identity(target, drafter, prompts, max_new_tokens, top_k))
    done = writer.done_keys
    datasets = {prompt.key: prompt.dataset for prompt in prompts}
    jobs = [Job(prompt.key, list(map(int, prompt.token_ids))) for prompt in prompts if prompt.key not in done]
    if progress is not None:
        progress(len(prompts) - len(jobs))
    generator = BatchedGenerator(target, drafter.feature_layers, max_new_tokens=max_new_tokens, num_rows=num_rows)
    for number, text in enumerate(generator.run(jobs), start=len(prompts) - len(jobs) + 1):
        writer.add(traced_text(drafter, text, top_k, datasets[text.key]))
        if progress is not None:
            progress(number)
    trace = writer.finish([prompt.key for prompt in prompts])
    # Only the finished trace lists every prompt: in each part the list would grow with the square of their number.
    trace = Trace({**trace.identity, **prompts_identity(prompts, seen)}, trace.texts)
    trace.save(out)
    return trace
