"""Incremental detokenization against decoding all tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_extras import find_stop_string
from support import many

from peagle.engine.detokenizer import Detokenizer

# Tokens with whole and partial UTF-8 characters of one to four bytes; one is never valid.
TOKEN_BYTES = [
    b"a",
    b"b",
    b"ab",
    b"ba ",
    "é".encode(),
    *(bytes([x]) for x in "é€🙂".encode()),
    b"a\xe2\x82",
    b"\xacb",
    b"\xff",
]
STOPS = ["a", "b", "ab", "ba", "aba", "b a", "é", "a€", "€b", "🙂", "bb", "abab", "\ufffda"]


def decode(tokens: list[int]) -> str:
    return b"".join(TOKEN_BYTES[t] for t in tokens).decode(errors="replace")


def decode_words(tokens: list[int]) -> str:
    """Like sentencepiece: a space between words, none before the first, so the left context matters."""
    return " ".join(("the", "cat", "sat", "é", "on")[t % 5] for t in tokens)


TOKENS = st.lists(st.integers(0, len(TOKEN_BYTES) - 1), min_size=1, max_size=24)


@many(800)
@given(TOKENS, st.lists(st.sampled_from(STOPS), max_size=3), st.integers(0, 6))
def test_equals_decoding_all_tokens(tokens: list[int], stop: Sequence[str], min_tokens: int) -> None:
    detokenizer = Detokenizer(decode, stop, min_tokens)
    streamed = ""
    for count, token in enumerate(tokens, 1):
        stopped = detokenizer.add_token(token)
        found = find_stop_string(decode, tokens[:count], stop, min_tokens)
        assert (detokenizer.stop_reason, detokenizer.text) == found if found is not None else not stopped
        assert stopped == (found is not None)
        assert detokenizer.streamable_text.startswith(streamed), "streamed text was taken back"
        streamed = detokenizer.streamable_text
        assert detokenizer.text.startswith(streamed)
        if stopped:
            break
        text = decode(tokens[:count])
        assert detokenizer.text == text.rstrip("\ufffd"), "complete characters must be in the text at once"
        held = detokenizer.text[len(streamed) :]
        assert not held or any(s.startswith(held) for s in stop), "held back without a possible stop string"
    else:
        detokenizer.finish()
        assert detokenizer.text == decode(tokens)


@many(400)
@given(st.lists(TOKENS, min_size=1, max_size=6), st.sampled_from([decode, decode_words]))
def test_tokens_in_groups(groups: list[list[int]], decode: Callable[[list[int]], str]) -> None:
    detokenizer, tokens = Detokenizer(decode), []
    for group in groups:
        detokenizer.add_tokens(group)
        tokens += group
        assert detokenizer.text == decode(tokens).rstrip("\ufffd")
    detokenizer.finish()
    assert detokenizer.text == decode(tokens)


@many(100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_left_context(tokens: list[int]) -> None:
    detokenizer = Detokenizer(decode_words)
    for count, token in enumerate(tokens, 1):
        assert not detokenizer.add_token(token)
        assert detokenizer.text == decode_words(tokens[:count])
    detokenizer.finish()
    assert detokenizer.text == decode_words(tokens)


def test_tokens_without_text() -> None:
    """The decoder skips special tokens."""

    def skipping(tokens: list[int]) -> str:
        return "".join("ab"[t] for t in tokens if t < 2)

    detokenizer = Detokenizer(skipping, ["ab"])
    assert [detokenizer.add_token(t) for t in (9, 9, 0, 9, 1)] == [False] * 4 + [True]
    assert detokenizer.text == "" and detokenizer.stop_reason == "ab"


def test_cost_per_token_is_constant() -> None:
    max_decoded = 0

    def watched(tokens: list[int]) -> str:
        nonlocal max_decoded
        max_decoded = max(max_decoded, len(tokens))
        return decode(tokens)

    detokenizer = Detokenizer(watched, ["nowhere"])
    for _ in range(200):
        for token in (0, 5, 6, 3):  # é in two tokens
            detokenizer.add_token(token)
    assert max_decoded < 10 and len(detokenizer.text) == 200 * 5


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [(["cd", "bcd"], "ab", "cd"), (["bcd", "cd"], "a", "bcd"), (["d", "bc"], "a", "bc"), (["e", "abcde"], "abcd", "e")],
)
def test_first_stop_string_to_end_wins_then_the_first_listed(stop: list[str], text: str, reason: str) -> None:
    detokenizer = Detokenizer(lambda tokens: "".join("abcde"[t] for t in tokens), stop)
    for token in range(5):
        if detokenizer.add_token(token):
            break
    assert (detokenizer.text, detokenizer.stop_reason) == (text, reason)
