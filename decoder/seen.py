"""Which prompts a drafter was trained on, by the digests of their token ids, so that tuning can keep away from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from profiles.files import read_json, write_atomic

SCHEMA, VERSION = "treebudget.prompts_seen", 1
FILE_NAME = "prompts_seen.json"
DIGEST_DIGITS = 16  # hexadecimal: two of a million prompts share one with a chance of 3e-8


def prompt_sha256(token_ids: Sequence[int]) -> str:
    """The first 16 hexadecimal digits of the sha256 of a prompt's token ids, written as a JSON list."""
    text = json.dumps([int(token) for token in token_ids])
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]


@dataclass(frozen=True)
class PromptsSeen:
    """Digests of the prompts in a drafter's training texts.

    `is_complete` is False where training began from a drafter whose own prompts are not known.
    """

    digests: frozenset[str]
    is_complete: bool = True

    @classmethod
    def of(cls, prompts: Iterable[Sequence[int]]) -> PromptsSeen:
        """Of prompts as token ids."""
        return cls(frozenset(prompt_sha256(ids) for ids in prompts))

    def after(self, earlier: PromptsSeen | None) -> PromptsSeen:
        """These, trained on top of a drafter that saw `earlier` (None: not known)."""
        if earlier is None:
            return PromptsSeen(self.digests, False)
        return PromptsSeen(self.digests | earlier.digests, self.is_complete and earlier.is_complete)

    def count(self, digests: Iterable[str]) -> int | None:
        """How many of `digests` are among these; None where none is but the record is not complete."""
        found = sum(digest in self.digests for digest in digests)
        return found if found or self.is_complete else None

    def save(self, folder: Path) -> Path:
        """Write prompts_seen.json into a drafter's folder."""
        record = {"schema": SCHEMA, "version": VERSION, "is_complete": self.is_complete, "prompts": sorted(self.digests)}
        return write_atomic(Path(folder) / FILE_NAME, json.dumps(record, indent=0) + "\n")

    @classmethod
    def load(cls, folder: Path) -> PromptsSeen | None:
        """Of the drafter in `folder`; None where its folder does not say. Raises FileFormatError for another kind of file."""
        try:
            record = read_json(Path(folder) / FILE_NAME, SCHEMA, VERSION)
        except FileNotFoundError:
            return None
        return cls(frozenset(map(str, record.get("prompts", []))), bool(record.get("is_complete", True)))


def prompts_seen_by(drafter: str) -> PromptsSeen | None:
    """Of a drafter by name, folder or hub id; None where that is not known."""
    from decoder.drafters.registry import find_drafter

    return PromptsSeen.load(find_drafter(drafter))
