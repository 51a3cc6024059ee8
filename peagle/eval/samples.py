"""Acceptance counts of responses, and the result rows they add up to.

An `AcceptanceSample` is one response, or several responses of which only the sum is known. Rows are sums of samples;
confidence intervals come from resampling them.

`replay_drafts` derives the drafts of a response for any K. Worked example: a prompt of 3 tokens, a response of 6 tokens
(positions 3..8), and for every number n of known tokens the length of the correct run that the drafter predicts there.
The prefill yields the first token, so the first draft starts at n = 4:

    n          4  5  6  7  8
    runs       2  0  1  3  0
    K = 1      1     1     0       drafts at 4, 6, 8 accept 1, 1, 0 tokens
    K = 3      2        3          drafts at 4, 7 accept 2, 3 tokens; two of the last lie beyond the end but count
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peagle.config import EvalSettings
from peagle.results.schema import AcceptanceRow, Interval

BOOTSTRAP_CHUNK = 100


@dataclass(frozen=True)
class DraftResult:
    """One verification step with draft tokens."""

    num_known_tokens: int  # prompt and output tokens before the step
    num_accepted_tokens: int  # before the output is cut at its end, as vLLM counts
    num_output_tokens: int


@dataclass(frozen=True)
class AcceptanceSample:
    category: str | None
    num_responses: int
    num_output_tokens: int
    num_drafts: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    is_looping: bool | None = None  # None: several responses whose counts are not known separately
    drafts: tuple[DraftResult, ...] | None = None  # None: not known one by one


def replay_drafts(
    num_prompt_tokens: int,
    num_output_tokens: int,
    runs: Mapping[int, int] | Sequence[int],
    num_speculative_tokens: int,
    max_model_len: int,
) -> list[DraftResult]:
    """Drafts of a response; the last position before max_model_len has none."""
    drafts, n, end = [], num_prompt_tokens + 1, num_prompt_tokens + num_output_tokens
    while n < end:
        num_draft_tokens = min(num_speculative_tokens, max_model_len - n - 1)
        num_accepted = min(runs[n], num_draft_tokens) if num_draft_tokens > 0 else 0
        if num_draft_tokens > 0:
            drafts.append(DraftResult(n, num_accepted, min(num_accepted + 1, end - n)))
        n += num_accepted + 1
    return drafts


def build_sample(
    category: str | None, num_output_tokens: int, is_looping: bool, drafts: Sequence[DraftResult], k: int
) -> AcceptanceSample:
    accepted_per_pos = tuple(sum(draft.num_accepted_tokens > i for draft in drafts) for i in range(k))
    return AcceptanceSample(category, 1, num_output_tokens, len(drafts), accepted_per_pos, is_looping, tuple(drafts))


def build_rows(
    samples: Sequence[AcceptanceSample], k: int, settings: EvalSettings, labels: Mapping[str, Any]
) -> list[AcceptanceRow]:
    """Rows of the whole data set, without looping responses, by category and by context length.

    `labels` are the other fields of the rows: drafter, method, engine, dataset and temperature.
    """
    whole = {**labels, "category": None, "context_range": None, "looping_responses": "included"}

    def build_row(some: Sequence[AcceptanceSample], **part: Any) -> AcceptanceRow:
        """A row of some samples; `part` has the fields that say which part of the data set they are."""
        return AcceptanceRow(
            **(whole | part),
            num_speculative_tokens=k,
            num_responses=sum(s.num_responses for s in some),
            num_output_tokens=sum(s.num_output_tokens for s in some),
            num_drafts=sum(s.num_drafts for s in some),
            num_accepted_tokens_per_pos=[sum(s.num_accepted_tokens_per_pos[i] for s in some) for i in range(k)],
            acceptance_length_ci95=bootstrap_interval(some, settings),
        )

    rows = [build_row(samples)]
    if all(s.is_looping is not None for s in samples):
        rows.append(build_row([s for s in samples if not s.is_looping], looping_responses="excluded"))
    categories = sorted({s.category for s in samples if s.category is not None})
    if len(categories) > 1 or (categories and any(s.category is None for s in samples)):
        rows += [build_row([s for s in samples if s.category == c], category=c) for c in categories]
    if all(s.drafts is not None for s in samples):
        ranges = context_ranges(samples, settings.context_bounds)
        if len(ranges) > 1:
            rows += [build_row(select_context(samples, one, k), context_range=one) for one in ranges]
    return rows


def context_ranges(samples: Iterable[AcceptanceSample], bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges between the bounds in which drafts start. Beyond the last bound, ranges double."""
    starts = [draft.num_known_tokens for s in samples for draft in s.drafts or ()]
    edges = [0, *bounds]
    while starts and max(starts) >= edges[-1]:
        edges.append(max(2 * edges[-1], 1))
    ranges = zip(edges, edges[1:], strict=False)
    return [(low, high) for low, high in ranges if any(low <= start < high for start in starts)]


def select_context(
    samples: Iterable[AcceptanceSample], context_range: tuple[int, int], k: int
) -> list[AcceptanceSample]:
    """Samples of the drafts that start in the range; their output tokens are those of these drafts."""
    selected = []
    for s in samples:
        drafts = [d for d in s.drafts or () if context_range[0] <= d.num_known_tokens < context_range[1]]
        if drafts:
            num_output_tokens = sum(draft.num_output_tokens for draft in drafts)
            selected.append(build_sample(s.category, num_output_tokens, bool(s.is_looping), drafts, k))
    return selected


def bootstrap_interval(samples: Sequence[AcceptanceSample], settings: EvalSettings) -> Interval | None:
    """95% bootstrap interval of the acceptance length; None below `settings.min_samples` samples."""
    # Sorted, so that the interval does not depend on the order of the responses.
    totals = sorted((s.num_drafts, sum(s.num_accepted_tokens_per_pos)) for s in samples if s.num_drafts)
    counts = np.array(totals, dtype=np.float64)
    if len(counts) < settings.min_samples:
        return None
    rng = np.random.default_rng(settings.seed)
    lengths: list[NDArray[np.float64]] = []
    for _ in range(0, settings.bootstrap_samples, BOOTSTRAP_CHUNK):
        drawn = rng.integers(len(counts), size=(BOOTSTRAP_CHUNK, len(counts)))
        num_drafts, num_accepted = counts[drawn].sum(1).T
        lengths.append(1 + num_accepted / num_drafts)
    low, high = np.percentile(np.concatenate(lengths), (2.5, 97.5))
    return float(low), float(high)
