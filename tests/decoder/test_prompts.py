"""Prompts files and the text stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoder.errors import ContextError, PromptError, UsageError
from decoder.prompts import (
    Prompt,
    encode_prompt,
    encode_prompts,
    leave_out_long,
    load_prompts,
    parse_prompt,
    prompts_sha256,
)
from decoder.streaming import TextStream
from tests.decoder.helpers import ALPHABET, tiny_tokenizer


def test_the_packages_own_prompts() -> None:
    prompts = load_prompts()
    assert len(prompts) == 24 and len({prompt.text for prompt in prompts}) == 24
    assert {prompt.dataset for prompt in prompts} == {"word-problems", "math", "code", "reasoning", "chat"}
    assert len(load_prompts(limit=5)) == 5
    assert len(prompts_sha256(prompts)) == 64


def test_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one", "later"], "dataset": "d"}\n\n{"prompt": "two", "key": "k"}\n')
    assert load_prompts(path) == [Prompt("one", "d", "1"), Prompt("two", None, "k")]


@pytest.mark.parametrize(("line", "said"), [
    ("{", "line 2: not JSON"),
    ("[1]", "line 2: expected an object"),
    ('{"text": "x"}', "exactly one of the fields"),
    ('{"prompt": "x", "turns": ["y"]}', "exactly one of the fields"),
    ('{"turns": []}', '"turns" must be'),
    ('{"turns": "x"}', '"turns" must be'),
    ('{"turns": [" "]}', '"turns" must be text'),
    ('{"prompt": 3}', '"prompt" must be text'),
    ('{"prompt": ""}', '"prompt" must be text'),
    ('{"prompt": "x", "dataset": [1]}', '"dataset" must be text'),
    ('{"prompt": "half \\ud83d"}', "half of a surrogate pair"),
    ("[" * 200_000, "nested too deeply"),
])
def test_errors_name_line_and_field(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(PromptError, match="line 2") as caught:
        load_prompts(path)
    assert said in str(caught.value) and isinstance(caught.value, UsageError)


def test_line_separators_inside_a_text_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "one\u2028two\x85three", "key": null}\r\n{"prompt": "four"}\r\n'.encode())
    assert load_prompts(path) == [Prompt("one\u2028two\x85three", None, "1"), Prompt("four", None, "2")]


def test_files_that_are_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no prompts file"):
        load_prompts(tmp_path / "missing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(PromptError, match="no prompts"):
        load_prompts(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\x80\x81\xff")
    with pytest.raises(PromptError, match="UTF-8"):
        load_prompts(tmp_path / "binary")
    with pytest.raises(PromptError, match="not a text file"):
        load_prompts(tmp_path)
    assert parse_prompt('{"prompt": "x"}', "here").text == "x"


def test_chat_template_and_mask_token_value() -> None:
    """Case 17: a prompt may hold any token, the drafter's mask token among them, and comes back untouched."""
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(encode_prompt(tokenizer, "hi there")) == "<hi there>"
    assert tokenizer.decode(encode_prompt(tiny_tokenizer(chat=False), "hi there")) == "hi there"
    every = encode_prompt(tokenizer, ALPHABET)
    assert set(range(1, len(ALPHABET) + 1)) <= set(every)
    encoded = encode_prompts(tokenizer, [Prompt("ab", "d", "k")])
    assert encoded[0].key == "k" and encoded[0].dataset == "d" and len(encoded[0].token_ids) == 4
    with pytest.raises(PromptError, match="key 'k'"):
        encode_prompts(tokenizer, [Prompt("a", None, "k"), Prompt("b", None, "k")])


class ByteTokenizer:
    """One token per byte of UTF-8, to split characters."""

    def decode(self, token_ids: list[int], **_options: object) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def test_stream_gives_the_whole_text_and_never_half_a_character() -> None:
    text = "naïve → 漢字 😀 " * 20 + "end"
    stream, pieces = TextStream(ByteTokenizer(), frozenset({255})), []
    for byte in text.encode():
        piece = stream.push([byte])
        assert "\ufffd" not in piece
        pieces.append(piece)
    pieces.append(stream.push([255]))
    assert "".join(pieces) + stream.finish() == text
    assert TextStream(ByteTokenizer()).finish() == ""
    cut = TextStream(ByteTokenizer())
    assert cut.push([0xE6]) == "" and cut.finish() == "\ufffd"


def test_prompts_that_the_context_does_not_hold_are_left_out_by_name() -> None:
    prompts = [Prompt(letter * size, key=letter) for letter, size in (("a", 8), ("b", 9), ("c", 50))]  # and < and > each
    assert leave_out_long(tiny_tokenizer(), prompts, 20, 72) == (prompts, "")
    kept, said = leave_out_long(tiny_tokenizer(), prompts, 20, 30)
    assert kept == prompts[:1]
    assert said == "left out: 2 of 3 prompts have more than the 10 tokens that fit a context of 30: b (11), c (52)"
    with pytest.raises(ContextError, match="3 of 3 prompts have more than the 5 tokens"):
        leave_out_long(tiny_tokenizer(), prompts, 25, 30)
