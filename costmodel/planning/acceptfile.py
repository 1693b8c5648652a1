"""Acceptance from files: a JSON of survival or engine counters, and traces read for survival only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.errors import FileFormatError
from costmodel.planning.acceptance import Acceptance, from_conditional, from_counts, from_histogram, from_lengths

FORMS = "survival, conditional, acceptance_histogram, num_drafts + num_accepted_tokens_per_pos, acceptance_lengths"


def read_acceptance(path: str | os.PathLike[str]) -> Acceptance:
    """Read a JSON object with one of the keys in FORMS; vLLM's `vllm:spec_decode_` prefix and a wrapping are accepted.

    `num_rounds` beside `survival` or `conditional` (given all positions before) says how many rounds are behind it, and
    gives it an interval; `siblings` makes a tree.
    Raises FileFormatError or ImpossibleAcceptance.
    """
    source = Path(path)
    try:
        document = json.loads(source.read_text(encoding="utf-8-sig"))
        fields = {str(key).removeprefix("vllm:spec_decode_"): value for key, value in _unwrapped(document).items()}
        return _from_fields(fields, source.name)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FileFormatError(f"{source} is not valid JSON: {error}", hint=f"expected an object with {FORMS}") from error
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise FileFormatError(f"{source} has no acceptance to read: {error}", hint=f"expected {FORMS}") from error


def _unwrapped(document: Any) -> dict[str, Any]:
    for key in ("speculative_decoding", "acceptance"):
        if isinstance(document.get(key), dict):
            return document[key]
    return document


def _from_fields(fields: dict[str, Any], name: str) -> Acceptance:
    siblings = tuple(float(share) for share in fields.get("siblings", ()))
    for form in ("survival", "conditional"):
        if form in fields:
            rounds = fields.get("num_rounds")
            values = tuple(float(value) for value in fields[form])
            survival = values if form == "survival" else from_conditional(values, len(values)).survival
            if rounds is not None and (isinstance(rounds, bool) or int(rounds) != rounds):
                raise ValueError(f"num_rounds is {rounds!r}, expected a whole number of at least 1")
            return Acceptance(survival, f"{form} in {name}", siblings, None if rounds is None else int(rounds))
    if "acceptance_histogram" in fields:
        found = from_histogram([float(count) for count in fields["acceptance_histogram"]], f"histogram in {name}")
    elif "num_accepted_tokens_per_pos" in fields:
        counts = [float(count) for count in fields["num_accepted_tokens_per_pos"]]
        found = from_counts(counts, float(fields["num_drafts"]), f"counters in {name}")
    elif "acceptance_lengths" in fields:
        given = fields["acceptance_lengths"]
        lengths = [given[key] for key in sorted(given, key=int)] if isinstance(given, dict) else given
        found = from_lengths([float(length) for length in lengths])
    else:
        raise KeyError(f"none of {FORMS}")
    return Acceptance(found.survival, found.source, siblings, found.num_rounds)


def read_trace(path: str | os.PathLike[str]) -> Acceptance:
    """Survival of the drafter's first candidates in a trace (safetensors of `decoder trace`), walked as chain decoding would.

    A round that the end of the text cuts short is left out: what it would have accepted is unknown, not 0. Where the
    first candidate was wrong, the ranks of the right one give `siblings`' shares; they are reported, and used for a tree.
    """
    from safetensors import SafetensorError, safe_open

    source = Path(path)
    try:
        with safe_open(source, framework="numpy") as stream:
            about = json.loads((stream.metadata() or {}).get("treebudget", "{}"))
            names = ("token_ids", "text_lengths", "num_prompt_tokens", "draft_token_ids")
            tokens, lengths, prompts, drafts = (stream.get_tensor(name) for name in names)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise FileFormatError(f"{source} is no trace: {error}", hint="expected a file written by decoder trace") from error
    if not isinstance(about, dict) or about.get("schema") != "treebudget.trace":
        found_schema = about.get("schema") if isinstance(about, dict) else about
        raise FileFormatError(f"{source}: schema is {found_schema!r}, expected 'treebudget.trace'")
    _check_arrays(source, tokens, lengths, prompts, drafts)
    counts, ranks = _walk(tokens, lengths, prompts, drafts)
    if not counts.sum():
        raise FileFormatError(f"{source} has no complete round to read acceptance from", hint="trace more or longer texts")
    found = from_histogram(counts.tolist(), f"trace {source.name}")
    missed = counts[:-1].sum()
    shares = tuple(float(share) for share in ranks / missed) if missed else ()
    return Acceptance(found.survival, found.source, shares, found.num_rounds)


def _check_arrays(source: Path, tokens: Any, lengths: Any, prompts: Any, drafts: Any) -> None:
    """Raise FileFormatError where a trace's arrays are of other shapes or kinds, or do not cover each other."""
    flat = all(array.ndim == 1 and array.dtype.kind in "iu" for array in (tokens, lengths, prompts))
    fits = flat and lengths.shape == prompts.shape and bool(((prompts >= 0) & (prompts <= lengths)).all())
    if not fits or drafts.ndim != 3 or not (len(drafts) == 0 or drafts.shape[2] > 0):
        raise FileFormatError(f"{source} contradicts itself: its arrays are no texts with drafts")
    if int(lengths.sum()) != len(tokens) or int((lengths - prompts).sum()) != len(drafts):
        raise FileFormatError(f"{source} contradicts itself: its texts take other numbers of tokens or drafts than it holds")


def _walk(tokens: Any, lengths: Any, prompts: Any, drafts: Any) -> tuple[Any, Any]:
    """Rounds by accepted tokens (depth + 1,), and misses by the rank of the right token from the second on (K - 1,)."""
    depth, num_candidates = drafts.shape[1:]
    counts, ranks = np.zeros(depth + 1, int), np.zeros(max(num_candidates - 1, 0), int)
    start = first_anchor = 0
    for length, prompt in zip(lengths.tolist(), prompts.tolist(), strict=True):
        text = tokens[start + prompt : start + length]
        anchor = 0
        while anchor + depth < text.size:
            draft, truth = drafts[first_anchor + anchor], text[anchor + 1 : anchor + 1 + depth]
            wrong = np.flatnonzero(draft[:, 0] != truth)
            accepted = int(wrong[0]) if wrong.size else depth
            counts[accepted] += 1
            if wrong.size:
                ranks += draft[accepted, 1:] == truth[accepted]
            anchor += accepted + 1
        start, first_anchor = start + length, first_anchor + length - prompt
    return counts, ranks
