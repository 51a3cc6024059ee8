"""The result of verification. Shapes: B requests, K draft tokens, Q = K + 1 verified rows per request."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AcceptedTokens(NamedTuple):
    """Which draft tokens were accepted and what each request outputs; all int64."""

    num_accepted_B: Tensor
    output_token_ids_BQ: Tensor  # accepted draft tokens, then the target's own token, then -1
    result_BX: Tensor  # X = Q + 2: the output tokens, the number of accepted and of verified draft tokens, for the host
