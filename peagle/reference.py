"""The whole of speculative decoding, slow and readable, no cache: the oracle for every engine.

Knows nothing about text, batches or speed: token ids in, token ids and counts out. Each pass recomputes the
whole sequence, so nothing stale can ever be read; what an engine keeps, it must keep to the same effect.

One round, for a sequence whose newest token the target has not read yet (n tokens known, K drafts):

    propose   the drafter reads the target's taps at positions 0..n-2 and the tokens one ahead of them
    verify    the target reads all n tokens and the K drafts in one pass; drafts are kept while they hold
    commit    the kept drafts and one token of the target's own, so a round always gains at least one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.config import SamplingParams, check_draft_tokens
from peagle.errors import UserError
from peagle.kernels.attention import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter


@dataclass(frozen=True)
class Draft:
    """Guessed tokens and the distribution each was drawn from; one-hot for a greedy guess."""

    tokens: list[int]
    probs_KV: Tensor


@dataclass(frozen=True)
class Round:
    """`accepted` counts before the text is cut at a stop or at max_tokens, as vLLM counts; `emitted` is
    what the text gained: accepted drafts first, the target's own token last unless it was cut off."""

    drafts: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]


@dataclass
class Generation:
    prompt_ids: list[int]
    draft_tokens: int
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)  # one for each pass of the target after the prompt's
    finish_reason: str = "length"

    @property
    def accepted_per_position(self) -> list[int]:
        """In how many rounds draft 1, 2, .. K was accepted."""
        return [sum(r.accepted > i for r in self.rounds) for i in range(self.draft_tokens)]

    @property
    def num_drafts(self) -> int:
        """Rounds that had drafts to verify; the last one before the context is full has no room for any."""
        return sum(bool(r.drafts) for r in self.rounds)

    @property
    def acceptance_length(self) -> float:
        """Tokens a round with drafts gains, the target's own included."""
        return 1 + sum(r.accepted for r in self.rounds) / max(self.num_drafts, 1)

    @property
    def drafted(self) -> list[bool]:
        """For each token of the text: was it a draft? The first came from the prompt's own pass."""
        return [False] + [i < r.accepted for r in self.rounds for i in range(len(r.emitted))]


@torch.inference_mode()
def generate(
    target: Decoder,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    eos_ids: frozenset[int] = frozenset(),
    drafter: Drafter | None = None,
    draft_tokens: int = 0,
    max_length: int | None = None,
    sample_drafts: bool = False,
    on_tokens: Callable[[Generation], None] = lambda generation: None,
) -> Generation:
    """Greedy output is the same with any drafter and with none; sampled output has the same distribution.

    `max_length` is the longest sequence, prompt included (default: what the target was made for).
    `sample_drafts` draws drafts from the drafter's distribution; otherwise they are its argmax.
    """
    longest = target.cfg.max_positions if max_length is None else min(max_length, target.cfg.max_positions)
    check_prompt(prompt_ids, target.cfg.vocab_size, longest)
    if drafter is not None:
        check_draft_tokens(draft_tokens)
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
    rng = torch.Generator().manual_seed(params.seed) if params.seed is not None else _fresh_rng()
    out = Generation(list(prompt_ids), draft_tokens if drafter is not None else 0)
    taps_of = drafter.cfg.taps if drafter is not None else ()

    known = list(prompt_ids)  # what the target has read
    probs, taps = read(target, known, 1, taps_of, params)
    newest = draw(probs[0], rng)
    finished = commit(out, [newest], stops, params.max_tokens, longest)
    on_tokens(out)
    while not finished:
        k = min(draft_tokens, longest - len(known) - 2) if drafter is not None else 0
        draft = Draft([], probs[:0])
        if drafter is not None and k > 0:
            draft = propose(drafter, [*known, newest], taps, k, params if sample_drafts else None, rng)
        read_now = [*known, newest, *draft.tokens]
        probs, taps = read(target, read_now, k + 1, taps_of, params)
        accepted, bonus = verify(draft, probs, rng)
        before = len(out.token_ids)
        finished = commit(out, [*draft.tokens[:accepted], bonus], stops, params.max_tokens, longest)
        out.rounds.append(Round(tuple(draft.tokens), accepted, tuple(out.token_ids[before:])))
        known, newest = read_now[: len(known) + 1 + accepted], bonus
        taps = taps[: len(known)]
        on_tokens(out)
    return out


def read(
    target: Decoder, tokens: list[int], last: int, taps: Sequence[int], params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """One pass of the target: what it would say after each of the `last` tokens, and its taps at all."""
    device = target.embed_tokens.weight.device
    hidden, tapped = target(
        torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), causal_attention, taps
    )
    return distribution(target.logits(hidden[-last:]), params), hidden[:, :0] if tapped is None else tapped


def distribution(logits_KV: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities in fp64, shaped by temperature, then top-k, then top-p; greedy is all on the argmax."""
    logits = logits_KV.detach().cpu().double()
    if params.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    logits = (logits - logits.amax(-1, keepdim=True)) / params.temperature  # from 0 down: never up to inf
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)  # of equals the lower id is kept
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= params.top_p  # the mass before a token already suffices
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits.softmax(-1)


def draw(probs_V: Tensor, rng: torch.Generator) -> int:
    return int(torch.multinomial(probs_V, 1, generator=rng))


def propose(
    drafter: Drafter,
    tokens: list[int],
    taps_TN: Tensor,
    k: int,
    params: SamplingParams | None,
    rng: torch.Generator,
) -> Draft:
    """K guesses after `tokens`, whose last the target has not read; `taps` are those of all but that one.

    The row at position p holds the taps at p and the token at p+1, and guesses the token at p+2. P-EAGLE adds
    K-1 mask rows behind and reads all K guesses off one pass. EAGLE-3 reads one guess a pass and appends a row
    made of that guess and its own output.

    Worked example, tokens a b c (c the newest), K = 3: P-EAGLE's rows are, by position,
    0: (b, taps at a)  1: (c, taps at b)  2: (mask, mask_hidden)  3: (mask, mask_hidden); guesses from rows 1, 2, 3.
    """
    cfg, device = drafter.cfg, taps_TN.device
    rows, hidden = tokens[1:], drafter.combine(taps_TN)

    def run() -> tuple[Tensor, Tensor]:
        positions = torch.arange(len(rows), device=device)
        return drafter(torch.tensor(rows, device=device), hidden, positions, causal_attention)

    if cfg.mask_token_id is not None:
        rows = rows + [cfg.mask_token_id] * (k - 1)
        hidden = torch.cat([hidden, drafter.masked(k - 1)])
        said, _ = run()
        return guess(drafter, said[-k:], params, rng)

    guesses = []
    for _ in range(k):
        said, handed_on = run()
        guesses.append(guess(drafter, said[-1:], params, rng))
        rows = rows + guesses[-1].tokens
        hidden = torch.cat([hidden, handed_on[-1:]])
    return Draft([g.tokens[0] for g in guesses], torch.cat([g.probs_KV for g in guesses]))


def guess(drafter: Drafter, said_KD: Tensor, params: SamplingParams | None, rng: torch.Generator) -> Draft:
    """Tokens of the target's vocabulary, with their distribution over it."""
    own = distribution(drafter.logits(said_KD), params or SamplingParams())
    ids = drafter.target_ids(torch.arange(own.shape[-1], device=said_KD.device)).cpu()
    probs = torch.zeros(len(own), drafter.cfg.vocab_size, dtype=own.dtype).index_copy(1, ids, own)
    return Draft([draw(p, rng) for p in probs], probs)


def verify(draft: Draft, target_probs: Tensor, rng: torch.Generator) -> tuple[int, int]:
    """How many drafts hold, and the token after them, which is the target's own.

    Draft x is kept with probability min(1, p(x) / q(x)); at the first that falls, the next token is drawn
    from max(p - q, 0), which makes up exactly what the drafter over- and under-proposed. With p on the
    argmax this is greedy verification: a draft holds if and only if it is the argmax.
    """
    for i, x in enumerate(draft.tokens):
        p, q = target_probs[i], draft.probs_KV[i]
        if float(torch.rand((), generator=rng, dtype=torch.float64)) * q[x] >= p[x]:
            return i, draw((p - q).clamp(min=0), rng)
    return len(draft.tokens), draw(target_probs[len(draft.tokens)], rng)


def commit(out: Generation, tokens: list[int], stops: frozenset[int], max_tokens: int, longest: int) -> bool:
    """Appends tokens up to the first that ends the text; True once it has ended."""
    for token in tokens:
        out.token_ids.append(token)
        if token in stops:
            out.finish_reason = "stop"
            return True
        if len(out.token_ids) >= max_tokens or len(out.prompt_ids) + len(out.token_ids) >= longest:
            out.finish_reason = "length"
            return True
    return False


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, longest: int) -> None:
    if not prompt_ids:
        raise UserError("the prompt is empty: give it at least one token")
    if len(prompt_ids) >= longest:
        raise UserError(f"the prompt has {len(prompt_ids)} tokens, but the context holds {longest} with the answer")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise UserError(f"a prompt token is outside the vocabulary (0 to {vocab_size - 1})")


def _fresh_rng() -> torch.Generator:
    rng = torch.Generator()
    rng.seed()
    return rng
