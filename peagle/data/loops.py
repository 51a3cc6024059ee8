"""Detects responses that repeat themselves, as small models often do. A drafter learns nothing from them.

Worked example, 8-grams: 1 2 3 4 5 6 7 8 9 | 3 4 5 6 7 8 9 3 4 .. The 8-gram behind the bar occurred at the third token
already, so the loop starts there.
"""

from __future__ import annotations

from collections.abc import Sequence

from peagle.config import LOOP_NGRAM_TOKENS, LOOP_REPEATED_SHARE, LOOP_TAIL_TOKENS

LOOP = "loop"  # finish reason of a looping response


def is_looping(token_ids: Sequence[int], finished: bool) -> bool:
    """True for an unfinished response in which more than 30% of the 8-grams are repeats."""
    if finished:
        return False
    n = LOOP_NGRAM_TOKENS
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(set(grams)) < (1 - LOOP_REPEATED_SHARE) * len(grams)


def num_tokens_before_loop(token_ids: Sequence[int]) -> int:
    """Number of tokens before the first repeated 8-gram."""
    seen = set()
    for i in range(len(token_ids) - LOOP_NGRAM_TOKENS + 1):
        gram = tuple(token_ids[i : i + LOOP_NGRAM_TOKENS])
        if gram in seen:
            return i
        seen.add(gram)
    return len(token_ids)


def is_repeating(token_ids: Sequence[int]) -> bool:
    """True if the last 96 tokens are one sequence repeated three times or more."""
    last = list(token_ids[-LOOP_TAIL_TOKENS:])
    if len(last) < LOOP_TAIL_TOKENS:
        return False
    end = last[-LOOP_NGRAM_TOKENS:]
    for period in range(1, LOOP_TAIL_TOKENS // 3 + 1):
        if last[-LOOP_NGRAM_TOKENS - period : -period] == end and last[period:] == last[:-period]:
            return True
    return False
