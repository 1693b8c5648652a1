"""Token ids as text: through the light package `tokenizers` where it is installed and a tokenizer.json is at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from profiles.paths import cache_dir
from selector.explain.errors import ExplainError

SPELLED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}


class TokenNames:
    """Names for token ids, whitespace made visible; without a tokenizer, or where a token is no text of its own, `#id`."""

    def __init__(self, decode: Callable[[list[int]], str] | None = None) -> None:
        self._decode = decode

    def __call__(self, token_id: int, length: int = 18) -> str:
        """The name of one token, cut to `length` characters."""
        name = self.text([token_id])
        if not name or "\ufffd" in name:
            return f"#{token_id}"
        return name if len(name) <= length else name[: length - 1] + "…"

    def text(self, token_ids: list[int], spaces: bool = False) -> str:
        """Several tokens as one text, with `spaces` as they are; empty without a tokenizer."""
        if self._decode is None:
            return ""
        spelled = {**SPELLED, " ": " "} if spaces else SPELLED
        characters = [spelled.get(character, character) for character in self._decode(token_ids)]
        return printable("".join(characters))


def printable(text: str) -> str:
    """Text without anything a terminal would obey, such characters as escapes."""
    return "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in text)


def tokenizer_file(name: str) -> Path:
    """Where the tokenizer.json of a file, a folder or a pulled target is (it need not exist)."""
    given = Path(name)
    if given.suffix == ".json":
        return given
    return given / "tokenizer.json" if given.is_dir() else cache_dir() / "targets" / name / "tokenizer.json"


def load_names(tokenizer: str | None, target: str | None) -> TokenNames:
    """Names by `tokenizer` (a file, a folder or a target), or else by the trace's `target`, if that is to be had.

    Raises ExplainError where a tokenizer was asked for and cannot be read.
    """
    path = tokenizer_file(tokenizer or target or "")
    if tokenizer is None and not path.is_file():
        return TokenNames()
    if not path.is_file():
        raise ExplainError(f"no tokenizer at {path}", hint="give a tokenizer.json, a folder with one, or a pulled target")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        if tokenizer is None:
            return TokenNames()
        raise ExplainError("spelling tokens needs the package tokenizers", hint="pip install tokenizers") from error
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ExplainError(f"{path} is no tokenizer: {error}") from error
    return TokenNames(lambda ids: loaded.decode(ids, skip_special_tokens=False))
