"""Prompts files: JSON lines, read with errors that name the line, and turned into token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from decoder.errors import ContextError, PromptError


@dataclass(frozen=True)
class Prompt:
    """One prompt: the first user turn. `key` names it within its file, `dataset` groups it in reports."""

    text: str
    dataset: str | None = None
    key: str = ""


def load_prompts(path: str | Path | None = None, limit: int | None = None) -> list[Prompt]:
    """Read `path`, or the package's own demo prompts for None; at most `limit` of them.

    A line is {"prompt": text} or {"turns": [text, ...]}, of which the first turn is used (later ones would need the
    answers to earlier ones), with optional "dataset" and "key". Raises PromptError naming line and field.
    """
    if path is None:
        name, text = "demo prompts", resources.files("decoder").joinpath("assets/prompts.jsonl").read_text("utf-8")
    else:
        name, text = str(path), _read(Path(path))
    prompts: list[Prompt] = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would part texts at U+2028 and its like
        if line.strip() and (limit is None or len(prompts) < limit):
            prompts.append(parse_prompt(line, f"{name}, line {number}", default_key=f"{number}"))
    if not prompts:
        raise PromptError(f"{name} has no prompts")
    return prompts


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError as error:
        raise PromptError(f"no prompts file {path}") from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise PromptError(f"{path} is not a text file in UTF-8") from error


def parse_prompt(line: str, where: str, default_key: str = "") -> Prompt:
    """One JSON line; `where` begins the message of a PromptError."""
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise PromptError(f"{where}: nested too deeply") from error
    if not isinstance(document, dict):
        raise PromptError(f"{where}: expected an object with \"prompt\" or \"turns\", got {type(document).__name__}")
    dataset, key = document.get("dataset"), document.get("key")
    for field, value in (("dataset", dataset), ("key", key)):
        if value is not None and not isinstance(value, str | int):
            raise PromptError(f"{where}: \"{field}\" must be text, got {type(value).__name__}")
    named = [None if value is None else str(value) for value in (dataset, key)]
    return Prompt(_prompt_text(document, where), named[0], default_key if named[1] is None else named[1])


def _prompt_text(document: dict[str, Any], where: str) -> str:
    if ("prompt" in document) == ("turns" in document):
        raise PromptError(f"{where}: expected exactly one of the fields \"prompt\" and \"turns\", got {sorted(document)}")
    if "turns" in document:
        turns = document["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise PromptError(f"{where}: \"turns\" must be a list of at least one text")
        text, field = turns[0], "turns"
    else:
        text, field = document["prompt"], "prompt"
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f"{where}: \"{field}\" must be text that is not empty")
    if not is_encodable(text):
        raise PromptError(f"{where}: \"{field}\" holds half of a surrogate pair, which is no text")
    return text


def is_encodable(text: str) -> bool:
    """Whether text can be written in UTF-8, as tokenizers want it: no half surrogate pairs."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user turn, through the tokenizer's chat template where it has one.

    The template is rendered to text first: what `apply_chat_template` returns for ids differs between releases.
    """
    if getattr(tokenizer, "chat_template", None):
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        return list(tokenizer(rendered, add_special_tokens=False).input_ids)
    return list(tokenizer(text).input_ids)


@dataclass
class EncodedPrompt:
    """A prompt as token ids, with its name and data set."""

    key: str
    dataset: str | None
    token_ids: Sequence[int]


def encode_prompts(tokenizer: Any, prompts: list[Prompt]) -> list[EncodedPrompt]:
    """All prompts as token ids; keys that occur twice raise PromptError."""
    keys = [prompt.key for prompt in prompts]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise PromptError(f"two prompts have the key {twice!r}")
    return [EncodedPrompt(prompt.key, prompt.dataset, encode_prompt(tokenizer, prompt.text)) for prompt in prompts]


def leave_out_long(tokenizer: Any, prompts: list[Prompt], max_new_tokens: int, context_limit: int) -> tuple[list[Prompt], str]:
    """The prompts that fit the target's context together with their new tokens, and a sentence on the others, or "".

    Raises ContextError where none fits.
    """
    if context_limit <= max_new_tokens:
        raise ContextError(f"{max_new_tokens} new tokens leave no room for a prompt in the target's context of {context_limit}",
                           hint="lower --max-new-tokens")
    lengths = [len(encode_prompt(tokenizer, prompt.text)) for prompt in prompts]
    room = context_limit - max_new_tokens
    kept = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= room]
    long = [f"{prompt.key} ({length})" for prompt, length in zip(prompts, lengths, strict=True) if length > room]
    if not long:
        return kept, ""
    named = ", ".join(long[:5]) + (", ..." if len(long) > 5 else "")
    count = f"{len(long)} of {len(prompts)} prompts"
    what = f"{count} have more than the {room} tokens that fit a context of {context_limit}: {named}"
    if not kept:
        raise ContextError(what, hint="shorten them, or lower --max-new-tokens")
    return kept, f"left out: {what}"


def prompts_sha256(prompts: list[Prompt]) -> str:
    """A checksum of the prompts' texts, for the identity of traces and records."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.text.encode("utf-8") + b"\0")
    return digest.hexdigest()
