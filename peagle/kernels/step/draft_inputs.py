"""From a verified round to the rows of the drafter's pass, and from its drafts to the next round.

Knows nothing about models: hidden states come in combined, drafts as token ids.

Shapes: B requests, Q verified rows a request, K drafts, D drafter width, R drafter rows, S slots of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.step.verify_inputs import SlotState
from peagle.kernels.triton_utils import pdl_launch_options

try:
    import triton
    from triton import language as tl
except ImportError:  # no wheel for this machine: the torch versions serve
    triton = None

_jit = triton.jit if triton is not None else lambda kernel: kernel


@dataclass(frozen=True)
class DraftInputs:
    """Rows of one drafter pass: request b owns rows b * (R / B) up to (b + 1) * (R / B)."""

    token_ids_R: Tensor  # int64
    hidden_states_RD: Tensor
    positions_R: Tensor  # int64
    query_lens_B: Tensor  # int32: how many rows of a request are real; the rest is padding, to be written nowhere
    sample_rows_BK: Tensor  # int64: the rows that guess. [B, 1] for EAGLE-3, [B, 0] if k is 0


def build_draft_inputs_torch(
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    starts_B: Tensor,
    hidden_TD: Tensor,
    mask_hidden_D: Tensor | None,
    mask_token_id: int | None,
    k: int,
    limit_B: Tensor,
) -> DraftInputs:
    requests, verified = output_token_ids_BQ.shape
    masks = max(k - 1, 0) if mask_token_id is not None else 0
    rows = verified + masks
    at = torch.arange(rows, device=output_token_ids_BQ.device)
    last = num_accepted_B.long()[:, None]
    real = at <= last  # [B, rows]

    tokens = output_token_ids_BQ.new_full((requests, rows), 0 if mask_token_id is None else mask_token_id)
    tokens[:, :verified] = torch.where(real[:, :verified], output_token_ids_BQ, tokens[:, :verified])
    hidden = hidden_TD.new_empty(requests, rows, hidden_TD.shape[1])
    hidden[:, :verified] = hidden_TD.unflatten(0, (requests, verified))
    if mask_token_id is not None:
        assert mask_hidden_D is not None, "mask rows need the mask's hidden state"
        hidden = torch.where(real[..., None], hidden, mask_hidden_D.to(hidden.dtype))
    limit = limit_B.long()
    starts = starts_B.long()
    positions = torch.minimum(starts[:, None] + at, limit[:, None] - 1).clamp(min=0)
    live = torch.minimum(last[:, 0] + 1 + masks, limit - starts).clamp(min=0)
    guesses = torch.arange(k if mask_token_id is not None else min(k, 1), device=output_token_ids_BQ.device)
    sample = torch.arange(requests, device=output_token_ids_BQ.device)[:, None] * rows + last + guesses
    return DraftInputs(tokens.flatten(), hidden.flatten(0, 1), positions.flatten(), live.int(), sample)


@_jit
def _draft_inputs_kernel(
    emitted: tl.tensor,
    emitted_stride: tl.tensor,
    accepted: tl.tensor,
    starts: tl.tensor,
    hidden: tl.tensor,
    hidden_stride: tl.tensor,
    mask_hidden: tl.tensor,
    mask_token: tl.tensor,
    limit: tl.tensor,
    token_ids: tl.tensor,
    hidden_out: tl.tensor,
    positions: tl.tensor,
    live: tl.tensor,
    sample: tl.tensor,
    Q: tl.constexpr,
    ROWS: tl.constexpr,
    SAMPLES: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row's piece of WIDTH hidden values; the row's first program also writes all the rest."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    b = row // ROWS
    j = row % ROWS
    m = tl.load(accepted + b).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if MASKED:
        real = j <= m
        own = tl.load(hidden + (b * Q + j) * hidden_stride + at, mask=(at < D) & real, other=0.0)
        mask = tl.load(mask_hidden + at, mask=(at < D) & (j > m), other=0.0)
        tl.store(hidden_out + row * D + at, tl.where(real, own, mask.to(own.dtype)), mask=at < D)
    else:  # as many rows as were verified, so each has a state, if only one that nobody reads
        own = tl.load(hidden + (b * Q + j) * hidden_stride + at, mask=at < D, other=0.0)
        tl.store(hidden_out + row * D + at, own, mask=at < D)
    if tl.program_id(1) == 0:
        token = tl.load(emitted + b * emitted_stride + j, mask=j <= m, other=0)
        tl.store(token_ids + row, tl.where(j <= m, token, mask_token))
        start = tl.load(starts + b).to(tl.int64)
        end = tl.load(limit + b).to(tl.int64)
        tl.store(positions + row, tl.maximum(tl.minimum(start + j, end - 1), 0))
        if j < SAMPLES:
            tl.store(sample + b * SAMPLES + j, b * ROWS + m + j)
        if j == 0:
            tl.store(live + b, tl.maximum(tl.minimum(m + 1 + (ROWS - Q), end - start), 0).to(tl.int32))


def build_draft_inputs_triton(
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    starts_B: Tensor,
    hidden_TD: Tensor,
    mask_hidden_D: Tensor | None,
    mask_token_id: int | None,
    k: int,
    limit_B: Tensor,
) -> DraftInputs:
    requests, verified = output_token_ids_BQ.shape
    width = hidden_TD.shape[1]
    masked = mask_token_id is not None
    assert not masked or mask_hidden_D is not None, "mask rows need the mask's hidden state"
    assert output_token_ids_BQ.stride(1) == 1 and hidden_TD.stride(1) == 1
    rows = verified + (max(k - 1, 0) if masked else 0)
    samples = k if masked else min(k, 1)
    device = output_token_ids_BQ.device
    out = DraftInputs(
        torch.empty(requests * rows, dtype=torch.int64, device=device),
        torch.empty(requests * rows, width, dtype=hidden_TD.dtype, device=device),
        torch.empty(requests * rows, dtype=torch.int64, device=device),
        torch.empty(requests, dtype=torch.int32, device=device),
        torch.empty(requests, samples, dtype=torch.int64, device=device),
    )
    piece = min(triton.next_power_of_2(width), 2048)
    _draft_inputs_kernel[(requests * rows, -(-width // piece))](
        output_token_ids_BQ,
        output_token_ids_BQ.stride(0),
        num_accepted_B.contiguous(),
        starts_B.contiguous(),
        hidden_TD,
        hidden_TD.stride(0),
        hidden_TD if mask_hidden_D is None else mask_hidden_D.contiguous(),  # not read without mask rows
        mask_token_id or 0,
        limit_B.contiguous(),
        out.token_ids_R,
        out.hidden_states_RD,
        out.positions_R,
        out.query_lens_B,
        out.sample_rows_BK if samples else out.positions_R,  # an empty tensor has no address, and is not written
        Q=verified,
        ROWS=rows,
        SAMPLES=samples,
        MASKED=masked,
        D=width,
        WIDTH=piece,
        num_warps=4,
        **pdl_launch_options(device),
    )
    return out


def build_draft_inputs(
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    starts_B: Tensor,
    hidden_TD: Tensor,
    mask_hidden_D: Tensor | None,
    mask_token_id: int | None,
    k: int,
    limit_B: Tensor,
) -> DraftInputs:
    """The drafter's rows after a round that verified Q rows a request, of which the drafts 1..m held.

    `emitted` and `accepted` are those of `accept`; `starts` is the position of row 0, `hidden` the combined aux
    states of
    the verified rows, `mask_hidden` the combined state of a mask row, `limit` the first position that may not be
    written. Row j of a request sits at position start + j:

        j <= m          the token that follows, emitted[j], and the state there: its keys and values stay
        m < j < m + K   the mask token and state (P-EAGLE): these are overwritten before anything later reads them
        beyond          padding, which `live` leaves out

    Rows m .. m + K - 1 guess. EAGLE-3 (mask_token_id None) has no mask rows; its first guess is read off row m.
    With k = 0 nothing guesses: the pass only keeps the drafter's cache up to date.

    Worked example, P-EAGLE, one request, K = 2, Q = 3, start 10, mask token 99. The target read the tokens a x y at
    positions 10 11 12, of which x held and y fell to b, so m = 1 and emitted is x b -1:

        row    0         1         2         3
        token  x         b         99        99
        state  at 10     at 11     mask      mask
        pos    10        11        12        13

    live is 3, as row 3 is padding; rows 1 and 2 guess the tokens at 13 and 14. (The row at p guesses p + 2.)
    With limit 12, live is 2, and the positions of rows 2 and 3 are clamped to 11.
    """
    made = build_draft_inputs_triton if output_token_ids_BQ.is_cuda and triton is not None else build_draft_inputs_torch
    return made(output_token_ids_BQ, num_accepted_B, starts_B, hidden_TD, mask_hidden_D, mask_token_id, k, limit_B)


def commit_state_torch(
    state: SlotState,
    slots_B: Tensor,
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    drafts_BK: Tensor,
    longest: Tensor | int,
    position_B: Tensor | None = None,
) -> None:
    used = slots_B >= 0
    if not used.all():
        slots_B, num_accepted_B, drafts_BK, output_token_ids_BQ = (
            slots_B[used],
            num_accepted_B[used],
            drafts_BK[used],
            output_token_ids_BQ[used],
        )
        longest = longest[used] if isinstance(longest, Tensor) else longest
        position_B = position_B[used] if position_B is not None else None
    slots, accepted, k = slots_B.long(), num_accepted_B.long(), drafts_BK.shape[1]
    state.token_ids_SN[slots, 0] = output_token_ids_BQ.gather(1, accepted[:, None])[:, 0].to(state.token_ids_SN.dtype)
    if k:
        state.token_ids_SN[slots, 1 : k + 1] = drafts_BK.to(state.token_ids_SN.dtype)
    start = state.num_computed_tokens_S[slots].long() + accepted + 1 if position_B is None else position_B.long()
    state.num_computed_tokens_S[slots] = start.to(state.num_computed_tokens_S.dtype)
    most = longest.long() if isinstance(longest, Tensor) else longest
    state.num_draft_tokens_S[slots] = (most - start - 2).clamp(0, k).to(state.num_draft_tokens_S.dtype)


@_jit
def _commit_kernel(
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    starts: tl.tensor,
    available: tl.tensor,
    slots: tl.tensor,
    emitted: tl.tensor,
    emitted_stride: tl.tensor,
    accepted: tl.tensor,
    drafts: tl.tensor,
    drafts_stride: tl.tensor,
    longest: tl.tensor,
    positions: tl.tensor,
    K: tl.constexpr,
    EACH: tl.constexpr,
    PLACED: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One request; WIDTH >= K + 1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    if slot >= 0:
        m = tl.load(accepted + b).to(tl.int64)
        at = tl.arange(0, WIDTH)
        newest = tl.load(emitted + b * emitted_stride + m)
        draft = tl.load(drafts + b * drafts_stride + at - 1, mask=(at > 0) & (at <= K), other=0)
        tl.store(tokens + slot * tokens_stride + at, tl.where(at == 0, newest, draft), mask=at <= K)
        if PLACED:
            start = tl.load(positions + b).to(tl.int64)
        else:
            start = tl.load(starts + slot).to(tl.int64) + m + 1
        tl.store(starts + slot, start)
        most = tl.load(longest + b).to(tl.int64) if EACH else longest
        tl.store(available + slot, tl.maximum(tl.minimum(most - start - 2, K), 0))


def commit_state_triton(
    state: SlotState,
    slots_B: Tensor,
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    drafts_BK: Tensor,
    longest: Tensor | int,
    position_B: Tensor | None = None,
) -> None:
    k = drafts_BK.shape[1]
    assert state.num_computed_tokens_S.is_contiguous() and state.num_draft_tokens_S.is_contiguous()
    assert (
        state.token_ids_SN.stride(1) == 1 and output_token_ids_BQ.stride(1) == 1 and (k < 2 or drafts_BK.stride(1) == 1)
    )
    _commit_kernel[(len(slots_B),)](
        state.token_ids_SN,
        state.token_ids_SN.stride(0),
        state.num_computed_tokens_S,
        state.num_draft_tokens_S,
        slots_B.contiguous(),
        output_token_ids_BQ,
        output_token_ids_BQ.stride(0),
        num_accepted_B.contiguous(),
        drafts_BK if k else output_token_ids_BQ,  # an empty tensor has no address, and is not read
        drafts_BK.stride(0),
        longest.contiguous() if isinstance(longest, Tensor) else longest,
        slots_B if position_B is None else position_B.contiguous(),
        K=k,
        EACH=isinstance(longest, Tensor),
        PLACED=position_B is not None,
        WIDTH=triton.next_power_of_2(k + 1),
        num_warps=1,
        **pdl_launch_options(state.token_ids_SN.device),
    )


def commit_state(
    state: SlotState,
    slots_B: Tensor,
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    drafts_BK: Tensor,
    longest: Tensor | int,
    position_B: Tensor | None = None,
) -> None:
    """Writes what the next round of each request reads into its slot, in place.

    The newest token and the drafts after it go to tokens[slot, 0 .. K] (N > K; what is behind stays), start becomes
    the newest token's position, and available is how many of the drafts the context has room to verify: after a
    start of s the text knows s + 1 tokens, and a round gains one more than it verifies, so longest - s - 2.
    `position` says where the newest tokens are; None: as far behind the last ones as the round went.

    `longest`, the context's length, is one for all or one for each request. Slots of a launch are distinct, but a
    negative one is a padding row and changes nothing. Tokens are int64; the rest is any integer type.
    """
    committed = commit_state_triton if state.token_ids_SN.is_cuda and triton is not None else commit_state_torch
    committed(state, slots_B, output_token_ids_BQ, num_accepted_B, drafts_BK, longest, position_B)
