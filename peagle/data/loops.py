"""Answers that go round in circles: what one is, where it begins, and how it shows while it is written.

Small models do that often when they are greedy. A drafter learns nothing but the loop from it.

Worked example, 8-grams: 1 2 3 4 5 6 7 8 9 | 3 4 5 6 7 8 9 3 4 .. The gram that begins behind the bar was there at the
third token, so that is where the text begins to repeat itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from peagle.config import LOOP_NGRAM_TOKENS, LOOP_REPEATED_SHARE, LOOP_TAIL_TOKENS

LOOP = "loop"  # how such an answer ended


def is_looping(token_ids: Sequence[int], ended: bool) -> bool:
    """No end, and more than 30% of the 8-grams repeat others."""
    if ended:
        return False
    grams = [tuple(token_ids[i : i + LOOP_NGRAM_TOKENS]) for i in range(len(token_ids) - LOOP_NGRAM_TOKENS + 1)]
    return len(set(grams)) < (1 - LOOP_REPEATED_SHARE) * len(grams)


def num_tokens_before_loop(token_ids: Sequence[int]) -> int:
    """How many tokens come before the first 8-gram that was there already."""
    seen = set()
    for i in range(len(token_ids) - LOOP_NGRAM_TOKENS + 1):
        gram = tuple(token_ids[i : i + LOOP_NGRAM_TOKENS])
        if gram in seen:
            return i
        seen.add(gram)
    return len(token_ids)


def is_repeating(token_ids: Sequence[int]) -> bool:
    """The last 96 tokens are the same few, three times or more: nothing else will come."""
    last = list(token_ids[-LOOP_TAIL_TOKENS:])
    if len(last) < LOOP_TAIL_TOKENS:
        return False
    end = last[-LOOP_NGRAM_TOKENS:]
    for period in range(1, LOOP_TAIL_TOKENS // 3 + 1):
        if last[-LOOP_NGRAM_TOKENS - period : -period] == end and last[period:] == last[:-period]:
            return True
    return False
