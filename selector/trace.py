"""A trace: what the target really produced and what the drafter proposed at every position of it.

Greedy decoding yields the same text under every policy, so a trace lets replay evaluate any policy exactly without a
model. Files are safetensors with JSON metadata; nothing in them is ever executed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.checks import is_whole
from profiles.errors import FileFormatError
from selector.errors import TraceError, TraceMismatch
from selector.tensors import read_tensors, write_tensors

SCHEMA, VERSION = "treebudget.trace", 2  # version 2 may hold the target's own distributions
LOG_TOLERANCE = 0.01  # log-probabilities above 0 by less are rounding of half precision


@dataclass(frozen=True, eq=False)
class TraceText:
    """One prompt, the target's continuation, and the drafts along it.

    Attributes:
        key: unique name of the prompt. dataset: where it came from, or None.
        num_prompt_tokens: length of the prompt, P.
        token_ids: (L,) int32 prompt and continuation.
        draft_token_ids: (A, depth, K) int32, A = L - P; anchor a has its root at position P + a (a = 0 is the first
            generated token) and row d is about position P + a + 1 + d. -1 pads.
        draft_logprobs: (A, depth, K) float32, normalised over the vocabulary.
        target_token_ids, target_logprobs: (A, M) int32 and float32, or both None: the target's own M best next tokens
            after anchor a's root, about position P + a + 1. So on the true path of anchor a the target's distribution at
            depth d + 1 is row a + d. -1 pads.
    """

    key: str
    dataset: str | None
    num_prompt_tokens: int
    token_ids: NDArray[np.int32]
    draft_token_ids: NDArray[np.int32]
    draft_logprobs: NDArray[np.float32]
    target_token_ids: NDArray[np.int32] | None = None
    target_logprobs: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        """Check shapes; raises TraceError."""
        anchors = len(self.token_ids) - self.num_prompt_tokens
        if self.token_ids.ndim != 1 or not 0 <= self.num_prompt_tokens <= len(self.token_ids):
            shape = self.token_ids.shape
            raise TraceError(f"text {self.key!r}: {self.num_prompt_tokens} prompt tokens do not fit tokens of shape {shape}")
        if self.draft_token_ids.ndim != 3 or self.draft_token_ids.shape != self.draft_logprobs.shape:
            shapes = self.draft_token_ids.shape, self.draft_logprobs.shape
            raise TraceError(f"text {self.key!r}: drafts must be (A, depth, K), got {shapes}")
        if len(self.draft_token_ids) != anchors:
            raise TraceError(f"text {self.key!r}: {len(self.draft_token_ids)} anchors for {anchors} generated tokens")
        ids, logprobs = self.target_token_ids, self.target_logprobs
        if (ids is None) != (logprobs is None):
            raise TraceError(f"text {self.key!r}: target_token_ids and target_logprobs come together or not at all")
        if ids is not None and logprobs is not None and (ids.ndim != 2 or ids.shape != logprobs.shape or len(ids) != anchors):
            shapes = ids.shape, logprobs.shape
            raise TraceError(f"text {self.key!r}: the target's distributions must be (A, M) for {anchors} anchors, got {shapes}")
        self._check_values()

    def _check_values(self) -> None:
        """NaN is let through: a draft of NaN is one that was made."""
        if self.num_anchors and self.draft_token_ids.shape[2] == 0:
            raise TraceError(f"text {self.key!r}: {self.num_anchors} anchors list no candidates (K is 0)")
        for name, lowest in (("token_ids", 0), ("draft_token_ids", -1), ("target_token_ids", -1)):
            ids = getattr(self, name)
            if ids is not None and ids.dtype.kind not in "iu":
                raise TraceError(f"text {self.key!r}: {name} must be whole numbers, got {ids.dtype}")
            if ids is not None and ids.size and not lowest <= ids.min() <= ids.max() < 2**31:
                raise TraceError(f"text {self.key!r}: {name} from {ids.min()} to {ids.max()}; allowed are {lowest} to 2^31 - 1")
        for name in ("draft_logprobs", "target_logprobs"):
            logs = getattr(self, name)
            if logs is not None and (logs.dtype.kind != "f" or (logs > LOG_TOLERANCE).any()):
                raise TraceError(f"text {self.key!r}: {name} must be logarithms of probabilities, at most 0")

    @property
    def num_anchors(self) -> int:
        """Generated tokens, A."""
        return len(self.draft_token_ids)

    def next_tokens(self) -> NDArray[np.int64]:
        """(A, depth) the target's own tokens after every root, -2 beyond the end of the text."""
        depth = self.draft_token_ids.shape[1]
        padded = np.concatenate([self.token_ids[self.num_prompt_tokens :].astype(np.int64), np.full(depth, -2)])
        return np.lib.stride_tricks.sliding_window_view(padded, depth)[1 : self.num_anchors + 1]


@dataclass(frozen=True, eq=False)
class Trace:
    """Texts and the identity of what made them: target, drafter, block_size, dtype, top_k, context range, prompts' sha256.

    `identity["drafter_saw"]`, where it is there, says how many of the prompts the drafter was trained on.
    """

    identity: dict[str, Any]
    texts: Sequence[TraceText]

    def __post_init__(self) -> None:
        """Check that all texts share depth, K and M and have keys of their own; raises TraceError."""
        shapes = {text.draft_token_ids.shape[1:] for text in self.texts}
        if len(shapes) > 1:
            raise TraceError(f"texts of one trace must share depth and K, found {sorted(shapes)}")
        widths = {text.target_token_ids.shape[1] for text in self.texts if text.target_token_ids is not None}
        if len(widths) > 1:
            raise TraceError(f"texts of one trace must share M, the target's candidates per token, found {sorted(widths)}")
        keys = [text.key for text in self.texts]
        if len(set(keys)) != len(keys):
            raise TraceError("texts of one trace must have different keys")

    @property
    def depth(self) -> int:
        """Drafted positions per round."""
        return int(self.texts[0].draft_token_ids.shape[1]) if self.texts else 0

    @property
    def top_k(self) -> int:
        """Candidates per depth."""
        return int(self.texts[0].draft_token_ids.shape[2]) if self.texts else 0

    @property
    def context_range(self) -> tuple[int, int] | None:
        """Smallest and largest number of committed tokens a round of these texts can start from; None without any."""
        texts = self.with_rounds().texts
        if not texts:
            return None
        return min(text.num_prompt_tokens for text in texts), max(len(text.token_ids) for text in texts) - 2

    @property
    def has_targets(self) -> bool:
        """Whether every text says what the target itself held likely."""
        return bool(self.texts) and all(text.target_token_ids is not None for text in self.texts)

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens of all texts, the first of each included."""
        return sum(text.num_anchors for text in self.texts)

    def check(self, expected: Mapping[str, Any]) -> None:
        """Raise TraceMismatch naming the first field known on both sides that differs."""
        for name, value in expected.items():
            found = self.identity.get(name)
            if value is not None and found is not None and found != value:
                raise TraceMismatch(name, value, found)

    def select(self, indices: Iterable[int]) -> Trace:
        """The trace of some of its texts."""
        return Trace(self.identity, [self.texts[i] for i in indices])

    def with_rounds(self) -> Trace:
        """The texts that hold a round: those of two generated tokens or more."""
        return Trace(self.identity, [text for text in self.texts if text.num_anchors >= 2])

    def without_repeats(self) -> Trace:
        """The texts without those whose prompt an earlier one has: fitted on one and judged on the other, nothing is held out."""
        kept: dict[tuple[int, ...], int] = {}
        for i, text in enumerate(self.texts):
            kept.setdefault(tuple(text.token_ids[: text.num_prompt_tokens].tolist()), i)
        return self if len(kept) == len(self.texts) else self.select(kept.values())

    @classmethod
    def merge(cls, traces: Sequence[Trace]) -> Trace:
        """All texts of traces of one identity, in order; raises TraceMismatch or TraceError."""
        if not traces:
            raise TraceError("no trace to merge")
        for other in traces[1:]:
            names = sorted(set(traces[0].identity) | set(other.identity))
            for name in names:
                if traces[0].identity.get(name) != other.identity.get(name):
                    raise TraceMismatch(name, traces[0].identity.get(name), other.identity.get(name))
        return cls(traces[0].identity, [text for trace in traces for text in trace.texts])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file, whole or not at all."""
        texts = self.texts
        tensors = {
            "token_ids": _join([text.token_ids for text in texts], np.int32, (0,)),
            "text_lengths": np.array([len(text.token_ids) for text in texts], np.int32),
            "num_prompt_tokens": np.array([text.num_prompt_tokens for text in texts], np.int32),
            "draft_token_ids": _join([text.draft_token_ids for text in texts], np.int32, (0, 0, 0)),
            "draft_logprobs": _join([text.draft_logprobs for text in texts], np.float32, (0, 0, 0)),
        }
        ids = [text.target_token_ids for text in texts if text.target_token_ids is not None]
        if ids:
            tensors["target_token_ids"] = _join(ids, np.int32, (0, 0))
            tensors["target_logprobs"] = _join(
                [text.target_logprobs for text in texts if text.target_logprobs is not None], np.float32, (0, 0)
            )
        about = {
            "identity": self.identity,
            "keys": [text.key for text in texts],
            "datasets": [text.dataset for text in texts],
            "has_target": [text.target_token_ids is not None for text in texts],
        }
        return write_tensors(path, tensors, SCHEMA, VERSION, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace; raises TraceError if the file is missing or is no trace."""
        try:
            about, tensors = read_tensors(path, SCHEMA, VERSION)
        except FileNotFoundError as error:
            raise TraceError(f"no trace at {path}", hint="record one with: decoder trace --out FILE") from error
        except FileFormatError as error:
            raise TraceError(f"{path} is no trace: {error}", error.hint or "expected a file written by decoder trace") from error
        try:
            _check_description(about)
            return cls(about["identity"], _split(about, tensors))
        except (KeyError, IndexError, ValueError, TypeError, AttributeError, TraceError) as error:
            raise TraceError(f"{path} contradicts itself: {error}") from error


def _join(arrays: Sequence[NDArray[Any]], dtype: Any, empty_shape: tuple[int, ...]) -> NDArray[Any]:
    return np.ascontiguousarray(np.concatenate(arrays), dtype) if arrays else np.zeros(empty_shape, dtype)


def _check_description(about: Mapping[str, Any]) -> None:
    """Raise TraceError where the description of a trace is of other types than it should be."""
    identity, keys, datasets, known = about["identity"], about["keys"], about["datasets"], about.get("has_target") or []
    if not isinstance(identity, dict):
        raise TraceError(f"its identity must be an object, got {identity!r}")
    for name, kind in (("target", str), ("drafter", str), ("dtype", str), ("block_size", int), ("drafter_saw", int)):
        value = identity.get(name)
        if value is None:
            continue
        if not (isinstance(value, str) if kind is str else is_whole(value)):
            raise TraceError(f"{name} of its identity must be {'text' if kind is str else 'a whole number'}, got {value!r}")
    for name, values, allowed in (("keys", keys, str), ("datasets", datasets, str | None), ("has_target", known, bool)):
        if not isinstance(values, list) or not all(isinstance(value, allowed) for value in values):
            raise TraceError(f"its {name} must be a list of {'true or false' if allowed is bool else 'texts'}")


def _split(about: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> list[TraceText]:
    texts, start, anchor, row = [], 0, 0, 0
    for name in ("text_lengths", "num_prompt_tokens"):
        if tensors[name].ndim != 1 or tensors[name].dtype.kind not in "iu":
            raise TraceError(f"{name} must be one whole number per text, got {tensors[name].dtype} {tensors[name].shape}")
    counts = zip(tensors["text_lengths"].tolist(), tensors["num_prompt_tokens"].tolist(), strict=True)
    targets = about.get("has_target") or [False] * len(about["keys"])  # version 1 has none
    for key, dataset, (length, prompt), known in zip(about["keys"], about["datasets"], counts, targets, strict=True):
        tokens, anchors = slice(start, start + length), slice(anchor, anchor + length - prompt)
        drafts = tensors["draft_token_ids"][anchors], tensors["draft_logprobs"][anchors]
        rows = slice(row, row + length - prompt)
        own = (tensors["target_token_ids"][rows], tensors["target_logprobs"][rows]) if known else (None, None)
        texts.append(TraceText(key, dataset, prompt, tensors["token_ids"][tokens], *drafts, *own))
        start, anchor, row = tokens.stop, anchors.stop, rows.stop if known else row
    used = {"token_ids": start, "draft_token_ids": anchor, "draft_logprobs": anchor}
    used |= {name: row for name in ("target_token_ids", "target_logprobs") if name in tensors}
    for name, count in used.items():
        if len(tensors[name]) != count:
            raise TraceError(f"its texts take {count} rows of {name}, it holds {len(tensors[name])}")
    return texts
