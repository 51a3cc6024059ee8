"""The whole of speculative decoding, slow and readable, no cache: the oracle for every engine.

Knows nothing about batches or speed, and of text only what the caller's `decode` makes of tokens. Each pass
recomputes the whole sequence, so nothing stale can ever be read; what an engine keeps, it must keep to the same
effect. What the parameters of a request mean stands at `SamplingParams`.

One round, for a sequence whose newest token the target has not read yet (n tokens known, K drafts):

    propose   the drafter reads the target's aux_hidden_states at positions 0..n-2 and the tokens one ahead of them
    verify    the target reads all n tokens and the K drafts in one pass; drafts are kept while they hold
    commit    the kept drafts and one token of the target's own, so a round always gains at least one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from peagle.config import SamplingParams, check_num_speculative_tokens
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter


@dataclass(frozen=True)
class DraftProposal:
    """Guessed tokens and the distribution each was drawn from; one-hot for a greedy guess."""

    tokens: list[int]
    probs_KV: Tensor


@dataclass(frozen=True)
class DecodeStep:
    """`accepted` counts before the text is cut at a stop or at max_tokens, as vLLM counts; `emitted` is
    what the text gained: accepted drafts first, the target's own token last unless it was cut off."""

    drafts: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]


@dataclass
class Generation:
    prompt_ids: list[int]
    num_speculative_tokens: int
    token_ids: list[int] = field(default_factory=list)
    steps: list[DecodeStep] = field(default_factory=list)  # one for each pass of the target after the prompt's
    finish_reason: str = "length"
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for EOS and length
    text: str | None = None  # once it has ended, if there is a `decode`: without the stop token or stop string
    # for each token its own logprob and then the likeliest tokens'; empty if none were asked for
    logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """In how many rounds draft 1, 2, .. K was accepted."""
        return [sum(r.accepted > i for r in self.steps) for i in range(self.num_speculative_tokens)]

    @property
    def num_drafts(self) -> int:
        """Rounds that had drafts to verify; the last one before the context is full has no room for any."""
        return sum(bool(r.drafts) for r in self.steps)

    @property
    def acceptance_length(self) -> float:
        """Tokens a round with drafts gains, the target's own included."""
        return 1 + sum(r.accepted for r in self.steps) / max(self.num_drafts, 1)

    @property
    def is_draft_token(self) -> list[bool]:
        """For each token of the text: was it a draft? The first came from the prompt's own pass."""
        return [False] + [i < r.accepted for r in self.steps for i in range(len(r.emitted))]


class Constraint(Protocol):
    """A request's grammar."""

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        """The tokens that may follow, EOS ids among them where the text may end: bool [V]. None where nothing may,
        and behind what may not come itself."""

    def complete(self, output: Sequence[int]) -> bool:
        """The output matches, and nothing may follow it."""


@dataclass(frozen=True)
class ReferenceRequest:
    """What decides over the next token and the end of the text, beside the tokens themselves."""

    prompt_ids: list[int]
    params: SamplingParams
    eos_ids: frozenset[int]
    max_model_len: int
    decode: Callable[[list[int]], str] | None
    constraint: Constraint | None = None


@torch.inference_mode()
def generate(
    target: Decoder,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    eos_ids: frozenset[int] = frozenset(),
    drafter: Drafter | None = None,
    num_speculative_tokens: int = 0,
    max_model_len: int | None = None,
    sample_draft_tokens: bool = False,
    on_tokens: Callable[[Generation], None] = lambda generation: None,
    decode: Callable[[list[int]], str] | None = None,
    constraint: Constraint | None = None,
) -> Generation:
    """Greedy output is the same with any drafter and with none; sampled output has the same distribution.

    `max_model_len` is the longest sequence, prompt included (default: what the target was made for).
    `sample_draft_tokens` draws drafts from the drafter's distribution; otherwise they are its argmax.
    `decode` makes text of the output's tokens; stop strings need it.
    `constraint` is what `params.grammar` means for this vocabulary.
    `params.n` is not looked at: this is one answer, n of them are n calls.
    """
    longest = target.cfg.max_positions if max_model_len is None else min(max_model_len, target.cfg.max_positions)
    check_prompt(prompt_ids, target.cfg.vocab_size, longest)
    params.check_ids(target.cfg.vocab_size, eos_ids)
    if params.stop and decode is None:
        raise UserError("--stop: stop strings need a tokenizer to make text of the tokens")
    if params.grammar is not None and constraint is None:
        raise UserError("grammar: the reference needs to be told what it allows (`constraint`)")
    if drafter is not None:
        check_num_speculative_tokens(num_speculative_tokens)
    request = ReferenceRequest(list(prompt_ids), params, eos_ids, longest, decode, constraint)
    rng = torch.Generator().manual_seed(params.seed) if params.seed is not None else _fresh_rng()
    out = Generation(list(prompt_ids), num_speculative_tokens if drafter is not None else 0)
    aux_layer_ids = drafter.cfg.aux_layer_ids if drafter is not None else ()

    known = list(prompt_ids)  # what the target has read
    logits, aux_hidden_states = run_target(target, known, 1, aux_layer_ids)
    newest = sample_token(compute_target_probs(logits, request, [], [])[0], rng)
    finished = append_tokens(out, [newest], logits, request)
    on_tokens(out)
    while not finished:
        k = min(num_speculative_tokens, longest - len(known) - 2) if drafter is not None else 0
        draft = DraftProposal([], logits[:0])
        if drafter is not None and k > 0:
            draft = propose_draft_tokens(
                drafter, [*known, newest], aux_hidden_states, k, params if sample_draft_tokens else None, rng
            )
        read_now = [*known, newest, *draft.tokens]
        logits, aux_hidden_states = run_target(target, read_now, k + 1, aux_layer_ids)
        accepted, bonus = verify_draft_tokens(
            draft, compute_target_probs(logits, request, out.token_ids, draft.tokens), rng
        )
        before = len(out.token_ids)
        finished = append_tokens(out, [*draft.tokens[:accepted], bonus], logits, request)
        out.steps.append(DecodeStep(tuple(draft.tokens), accepted, tuple(out.token_ids[before:])))
        known, newest = read_now[: len(known) + 1 + accepted], bonus
        aux_hidden_states = aux_hidden_states[: len(known)]
        on_tokens(out)
    return out


def run_target(target: Decoder, tokens: list[int], last: int, aux_layer_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One pass of the target: its raw logits after each of the `last` tokens, in fp64, and its aux states at all."""
    device = target.embed_tokens.weight.device
    hidden, aux_hidden_states = target(
        torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), causal_attention, aux_layer_ids
    )
    logits = target.compute_logits(hidden[-last:]).detach().cpu().double()
    return logits, hidden[:, :0] if aux_hidden_states is None else aux_hidden_states


def compute_target_probs(logits_KV: Tensor, request: ReferenceRequest, output: list[int], drafts: list[int]) -> Tensor:
    """What the target would say after the output and after each of the drafts, as the request shapes it."""
    shaped = []
    for i, row in enumerate(logits_KV):
        said = output + drafts[:i]
        allowed = request.constraint.allowed(said) if request.constraint is not None else None
        shaped.append(process_logits(row, request.params, request.prompt_ids, said, request.eos_ids, allowed))
    return compute_probs(torch.stack(shaped), request.params)


def process_logits(
    logits_V: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_ids: frozenset[int] = frozenset(),
    allowed_V: Tensor | None = None,
) -> Tensor:
    """Logits after `prompt` and `output` with all that moves the argmax: least length, bias, penalties, grammar."""
    logits, vocab = logits_V.detach().cpu().double(), logits_V.shape[-1]
    if len(output) < params.min_tokens:
        stops = [t for t in {*eos_ids, *params.stop_token_ids} if t < vocab]  # a tokenizer's EOS may lie beyond
        barred = torch.zeros(vocab, dtype=torch.bool).index_fill(0, torch.tensor(stops, dtype=torch.long), True)
        if allowed_V is None or bool((allowed_V & ~barred).any()):
            logits = logits.masked_fill(barred, -torch.inf)
    if params.logit_bias:
        biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        logits = logits.index_add(0, torch.tensor(list(params.logit_bias)), biases)
    if params.has_penalties:
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=vocab).double()
        seen = counts + torch.bincount(torch.tensor(prompt), minlength=vocab) > 0
        factor = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0).double()
    return logits if allowed_V is None else logits.masked_fill(~allowed_V, -torch.inf)


def compute_probs(logits_KV: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities in fp64: temperature, then min-p, then top-k, then top-p; greedy is all on the argmax."""
    logits = logits_KV.detach().cpu().double()
    if params.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    logits = (logits - logits.amax(-1, keepdim=True)) / params.temperature  # from 0 down: never up to inf
    if params.min_p > 0.0:
        logits = logits.masked_fill(logits.exp() < params.min_p, -torch.inf)
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        ordered = logits.sort(dim=-1, descending=True).values
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= params.top_p  # the mass before a token already suffices
        least = ordered.masked_fill(beyond, torch.inf).amin(-1, keepdim=True)  # what equals it stays
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits.softmax(-1)


def compute_token_logprobs(logits_V: Tensor, token: int, alternatives: int) -> dict[int, float]:
    """The token's own first, then the likeliest tokens'."""
    logprobs = logits_V.double().log_softmax(-1)
    likeliest = logprobs.sort(descending=True, stable=True).indices[:alternatives].tolist()
    return {t: float(logprobs[t]) for t in (token, *likeliest)}


def sample_token(probs_V: Tensor, rng: torch.Generator) -> int:
    return int(torch.multinomial(probs_V, 1, generator=rng))


def propose_draft_tokens(
    drafter: Drafter,
    tokens: list[int],
    aux_hidden_states_TN: Tensor,
    k: int,
    params: SamplingParams | None,
    rng: torch.Generator,
) -> DraftProposal:
    """K guesses after `tokens`, whose last the target has not read; `aux_hidden_states` are those of all but that one.

    The row at position p holds the aux states at p and the token at p+1, and guesses the token at p+2. P-EAGLE adds
    K-1 mask rows behind and reads all K guesses off one pass. EAGLE-3 reads one guess a pass and appends a row
    made of that guess and its own output.

    Worked example, tokens a b c (c the newest), K = 3: P-EAGLE's rows are, by position,
    0: (b, aux states at a)  1: (c, aux states at b)  2: (mask, mask_hidden)  3: (mask, mask_hidden); guesses from
    rows 1, 2, 3.
    """
    cfg, device = drafter.cfg, aux_hidden_states_TN.device
    rows, hidden = tokens[1:], drafter.combine_hidden_states(aux_hidden_states_TN)

    def run() -> tuple[Tensor, Tensor]:
        positions = torch.arange(len(rows), device=device)
        return drafter(torch.tensor(rows, device=device), hidden, positions, causal_attention)

    if cfg.mask_token_id is not None:
        rows = rows + [cfg.mask_token_id] * (k - 1)
        hidden = torch.cat([hidden, drafter.mask_hidden_states(k - 1)])
        said, _ = run()
        return sample_from_drafter(drafter, said[-k:], params, rng)

    guesses = []
    for _ in range(k):
        said, handed_on = run()
        guesses.append(sample_from_drafter(drafter, said[-1:], params, rng))
        rows = rows + guesses[-1].tokens
        hidden = torch.cat([hidden, handed_on[-1:]])
    return DraftProposal([g.tokens[0] for g in guesses], torch.cat([g.probs_KV for g in guesses]))


def sample_from_drafter(
    drafter: Drafter, said_KD: Tensor, params: SamplingParams | None, rng: torch.Generator
) -> DraftProposal:
    """Tokens of the target's vocabulary, with their distribution over it."""
    own = compute_probs(drafter.compute_logits(said_KD), params or SamplingParams())
    ids = drafter.to_target_ids(torch.arange(own.shape[-1], device=said_KD.device)).cpu()
    probs = torch.zeros(len(own), drafter.cfg.vocab_size, dtype=own.dtype).index_copy(1, ids, own)
    return DraftProposal([sample_token(p, rng) for p in probs], probs)


def verify_draft_tokens(draft: DraftProposal, target_probs: Tensor, rng: torch.Generator) -> tuple[int, int]:
    """How many drafts hold, and the token after them, which is the target's own.

    Draft x is kept with probability min(1, p(x) / q(x)); at the first that falls, the next token is drawn
    from max(p - q, 0), which makes up exactly what the drafter over- and under-proposed. With p on the
    argmax this is greedy verification: a draft holds if and only if it is the argmax.
    """
    for i, x in enumerate(draft.tokens):
        p, q = target_probs[i], draft.probs_KV[i]
        if float(torch.rand((), generator=rng, dtype=torch.float64)) * q[x] >= p[x]:
            return i, sample_token((p - q).clamp(min=0), rng)
    return len(draft.tokens), sample_token(target_probs[len(draft.tokens)], rng)


def append_tokens(out: Generation, tokens: list[int], logits_KV: Tensor, request: ReferenceRequest) -> bool:
    """Appends tokens, each said by its row of raw logits, up to the first that ends the text; True once it has."""
    constraint = request.constraint
    for token, logits in zip(tokens, logits_KV, strict=False):
        if constraint is not None and constraint.allowed(out.token_ids) is None:
            out.finish_reason, out.text = "error", request.decode(out.token_ids) if request.decode else None
            return True
        out.token_ids.append(token)
        if request.params.logprobs is not None:
            out.logprobs.append(compute_token_logprobs(logits, token, request.params.logprobs))
        found = find_finish(out.token_ids, request)
        if found is not None:
            out.finish_reason, out.stop_reason, out.text = found
            return True
    return False


def find_finish(said: list[int], request: ReferenceRequest) -> tuple[str, int | str | None, str | None] | None:
    """If the newest token ends the text: finish_reason, stop_reason and the text."""
    params, decode, newest = request.params, request.decode, said[-1]

    def text(tokens: list[int]) -> str | None:
        return None if decode is None else decode(tokens)

    if newest in request.eos_ids and not params.ignore_eos:
        return "stop", None, text(said[:-1])
    if newest in params.stop_token_ids:
        return "stop", newest, text(said[:-1])
    if decode is not None and (found := find_stop_string(decode, said, params)) is not None:
        return "stop", *found
    if request.constraint is not None and request.constraint.complete(said):
        return "stop", None, text(said)
    if len(said) >= params.max_tokens or len(request.prompt_ids) + len(said) >= request.max_model_len:
        return "length", None, text(said)
    return None


def find_stop_string(
    decode: Callable[[list[int]], str], said: list[int], params: SamplingParams
) -> tuple[str, str] | None:
    """The stop string that ends first, and the text before it.

    A character whose bytes have not all come is decoded to U+FFFD, and is not there yet: neither may it be taken
    for a stop string, nor may its place be counted to the first `min_tokens` tokens if a later one completes it.
    """

    def settled(tokens: list[int]) -> str:
        return decode(tokens).rstrip("\ufffd")

    if not params.stop:
        return None
    text, behind = settled(said), len(settled(said[: params.min_tokens]))
    found = []
    for i, stop in enumerate(params.stop):
        start = text.find(stop, max(0, behind + 1 - len(stop)))
        if start >= 0:
            found.append((start + len(stop), i, start))
    if not found:
        return None
    _, i, start = min(found)
    return params.stop[i], text[:start]


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
