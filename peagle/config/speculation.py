"""How many drafts a round has where nobody says, and may have at most."""

from __future__ import annotations

from peagle.errors import UserError

DEFAULT_DRAFT_TOKENS = 7  # where P-EAGLE peaks in the published results
EAGLE3_DRAFT_TOKENS = 3  # where autoregressive drafting does
MAX_DRAFT_TOKENS = 64


def usual_draft_tokens(parallel: bool) -> int:
    """Where nobody says how many."""
    return DEFAULT_DRAFT_TOKENS if parallel else EAGLE3_DRAFT_TOKENS


def check_draft_tokens(k: int) -> int:
    """The number of drafts a round, refused where it makes no sense."""
    if not 1 <= k <= MAX_DRAFT_TOKENS:
        raise UserError(f"-k {k}: the number of draft tokens must be between 1 and {MAX_DRAFT_TOKENS}")
    return k
