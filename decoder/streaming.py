"""Token ids in, text out as soon as it is certain: for streaming to a terminal."""

from __future__ import annotations

from typing import Any


class TextStream:
    """Decodes a growing list of tokens; `push` returns the new text, holding back characters that are not complete yet."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int] = frozenset()) -> None:
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        self.token_ids: list[int] = []
        self.start = 0  # tokens before this were decoded and printed with all after them
        self.printed = ""  # text of tokens from `start` that has been returned

    def push(self, token_ids: list[int]) -> str:
        """Add tokens and return the text they complete; stop tokens have no text."""
        self.token_ids.extend(token for token in token_ids if token not in self.stop_ids)
        text = self._decode()
        if text.endswith("\ufffd"):
            return ""
        fresh, self.printed = text[len(self.printed):], text
        if len(self.token_ids) - self.start > 64:  # keep the window short: decoding it costs its length
            self.start = len(self.token_ids) - 8
            self.printed = self._decode()
        return fresh

    def finish(self) -> str:
        """Whatever was held back."""
        text = self._decode()
        fresh, self.printed = text[len(self.printed):], text
        return fresh

    def _decode(self) -> str:
        return self.tokenizer.decode(self.token_ids[self.start:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
