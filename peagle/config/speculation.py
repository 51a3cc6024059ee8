"""Number of speculative tokens per decode step: defaults and limit."""

from __future__ import annotations

from peagle.errors import UserError

DEFAULT_NUM_SPECULATIVE_TOKENS = 7  # P-EAGLE peaks here in the published results
EAGLE3_NUM_SPECULATIVE_TOKENS = 3  # autoregressive drafting peaks here
MAX_SPECULATIVE_TOKENS = 64


def default_num_speculative_tokens(parallel: bool) -> int:
    """The default for a P-EAGLE (`parallel`) or EAGLE-3 drafter."""
    return DEFAULT_NUM_SPECULATIVE_TOKENS if parallel else EAGLE3_NUM_SPECULATIVE_TOKENS


def check_num_speculative_tokens(k: int) -> int:
    """Returns `k`, or raises a UserError if it is out of range."""
    if not 1 <= k <= MAX_SPECULATIVE_TOKENS:
        raise UserError(f"-k {k}: the number of speculative tokens must be between 1 and {MAX_SPECULATIVE_TOKENS}")
    return k
