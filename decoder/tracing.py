"""Recording a trace: the target's text for each prompt once, and what the drafter would have proposed at every place of it.

In greedy decoding the text does not depend on the policy, so one trace replays every policy exactly.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from decoder.batched import BatchedGenerator, Continuation, Job
from decoder.drafters.dflash import DFlashDrafter
from decoder.target import Target
from selector import Trace, TraceText

ROOTS_PER_PASS = 64


class TracePrompt(Protocol):
    """What tracing needs of a prompt: its tokens, a stable name, and the data set it belongs to, if any."""

    key: str
    dataset: str | None
    token_ids: Sequence[int]


def trace_identity(target: Target, drafter: Any, prompts: Iterable[TracePrompt], max_new_tokens: int, top_k: int) -> dict[str, Any]:
    """What a trace is a trace of. `prompts_sha256` covers the prompts' tokens, in order."""
    prompts = list(prompts)
    text = json.dumps([list(map(int, prompt.token_ids)) for prompt in prompts])
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        **{name: value for name, value in drafter.identity().items() if name in ("drafter", "block_size")},
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "context_tokens": [min(lengths), max(lengths) + max_new_tokens],
        "num_prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


@torch.inference_mode()
def draft_everywhere(drafter: DFlashDrafter, text: Continuation, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Top-K drafts at every root of a text: token ids (A, depth, K) int32 and log-probabilities (A, depth, K) float32.

    Root a stands at position num_prompt_tokens + a. Normalised over the whole vocabulary.
    """
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


def record_trace(target: Target, drafter: DFlashDrafter, prompts: Sequence[TracePrompt], *, max_new_tokens: int = 128,
                 top_k: int = 16, num_rows: int = 16, partial_dir: Path, out: Path | None = None,
                 progress: Callable[[int], None] | None = None) -> Trace:
    """Generate greedily, draft everywhere, and return the trace (saved to `out`, if given).

    Every finished text is kept in `partial_dir` at once, so a run that was killed goes on when called again with the same
    arguments; parts of another run in the same folder are left alone (their folder is named after the identity). Parts
    are removed when `out` is written. `progress` gets the number of texts done.
    """
    identity = trace_identity(target, drafter, prompts, max_new_tokens, top_k)
    tag = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(partial_dir) / tag
    folder.mkdir(parents=True, exist_ok=True)
    parts = [Trace.load(path) for path in sorted(folder.glob("part-*.safetensors"))]
    done = {text.key for part in parts for text in part.texts}
    datasets = {prompt.key: prompt.dataset for prompt in prompts}
    jobs = [Job(prompt.key, list(map(int, prompt.token_ids))) for prompt in prompts if prompt.key not in done]
    if progress is not None:
        progress(len(done))
    generator = BatchedGenerator(target, drafter.feature_layers, max_new_tokens=max_new_tokens, num_rows=num_rows)
    for text in generator.run(jobs):
        ids, logprobs = draft_everywhere(drafter, text, top_k)
        traced = TraceText(key=text.key, dataset=datasets[text.key], num_prompt_tokens=text.num_prompt_tokens,
                           token_ids=np.array(text.token_ids, dtype=np.int32), draft_token_ids=ids, draft_logprobs=logprobs)
        part = Trace(identity=identity, texts=[traced])
        part.save(folder / f"part-{len(parts):05d}.safetensors")
        parts.append(part)
        done.add(text.key)
        if progress is not None:
            progress(len(done))
    order = {prompt.key: place for place, prompt in enumerate(prompts)}
    texts = sorted((text for part in parts for text in part.texts), key=lambda text: order[text.key])
    trace = Trace(identity=identity, texts=texts)
    if out is not None:
        trace.save(out)
        shutil.rmtree(folder)
    return trace
