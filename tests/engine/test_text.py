"""The detokenizer, token by token, against decoding everything at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.config import SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.speculative.reference import find_stop_string

# Bytes of one, two, three and four byte characters, whole and in parts, joined with neighbours; some never valid.
PIECES = [
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
    return b"".join(PIECES[t] for t in tokens).decode(errors="replace")


def spaced(tokens: list[int]) -> str:
    """As sentencepiece does: a space between words, none before the first, so left context matters."""
    return " ".join(("the", "cat", "sat", "é", "on")[t % 5] for t in tokens)


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=24)


@many(800)
@given(TOKENS, st.lists(st.sampled_from(STOPS), max_size=3), st.integers(0, 6))
def test_text_and_stops_are_those_of_the_whole(tokens: list[int], stop: Sequence[str], min_tokens: int) -> None:
    grown = Detokenizer(decode, stop, min_tokens)
    params = SamplingParams(stop=stop, min_tokens=min_tokens)
    shown = ""
    for count, token in enumerate(tokens, 1):
        stopped = grown.feed(token)
        found = find_stop_string(decode, tokens[:count], params)
        assert (grown.stopped, grown.text) == found if found is not None else not stopped
        assert stopped == (found is not None)
        assert grown.showable.startswith(shown), "what was shown was taken back"
        shown = grown.showable
        assert grown.text.startswith(shown)
        if stopped:
            break
        text = decode(tokens[:count])
        assert grown.text == text.rstrip("\ufffd"), "whole characters are there at once, and nothing else"
        held = grown.text[len(shown) :]
        assert not held or any(s.startswith(held) for s in stop), "held back for no reason"
    else:
        grown.finish()
        assert grown.text == decode(tokens)


@many(100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_left_context_counts(tokens: list[int]) -> None:
    grown = Detokenizer(spaced)
    for count, token in enumerate(tokens, 1):
        assert not grown.feed(token)
        assert grown.text == spaced(tokens[:count])
    grown.finish()
    assert grown.text == spaced(tokens)


def test_tokens_without_text() -> None:
    """Special tokens are skipped by the decoder: nothing is said, nothing is lost."""

    def skipping(tokens: list[int]) -> str:
        return "".join("ab"[t] for t in tokens if t < 2)

    grown = Detokenizer(skipping, ["ab"])
    assert [grown.feed(t) for t in (9, 9, 0, 9, 1)] == [False] * 4 + [True]
    assert grown.text == "" and grown.stopped == "ab"


def test_a_long_answer_costs_what_a_short_one_does() -> None:
    longest = 0

    def watched(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    grown = Detokenizer(watched, ["nowhere"])
    for _ in range(200):
        for token in (0, 5, 6, 3):  # é in two pieces
            grown.feed(token)
    assert longest < 10 and len(grown.text) == 200 * 5


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [(["cd", "bcd"], "ab", "cd"), (["bcd", "cd"], "a", "bcd"), (["d", "bc"], "a", "bc"), (["e", "abcde"], "abcd", "e")],
)
def test_of_several_the_first_to_end_then_the_first_listed(stop: list[str], text: str, reason: str) -> None:
    grown = Detokenizer(lambda tokens: "".join("abcde"[t] for t in tokens), stop)
    for token in range(5):
        if grown.feed(token):
            break
    assert (grown.text, grown.stopped) == (text, reason)
