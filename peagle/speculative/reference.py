"""Speculative decoding in plain, slow PyTorch: the oracle that every engine is tested against.

There is no KV cache and no batch: each forward pass recomputes one whole sequence, so nothing stale can be read.
`SamplingParams` defines the meaning of each request parameter. Text, grammars and logprobs are left out.

One decode step, for a sequence of n tokens whose newest token the target has not processed yet:

    propose   the drafter reads the target's aux hidden states at positions 0..n-2 and the tokens one position ahead
    verify    the target processes all n tokens and K draft tokens in one pass; draft tokens are accepted left to right
    commit    the accepted draft tokens and one token sampled from the target are appended: at least one token per step

Shapes: V vocabulary, K draft tokens (target rows: K + 1), T tokens, N width of the concatenated aux hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.config import SamplingParams, check_num_speculative_tokens, check_prompt
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter


@dataclass(frozen=True)
class DraftProposal:
    """Draft tokens and the distribution each was sampled from: one-hot for a greedy draft token."""

    token_ids: list[int]
    probs_KV: Tensor


@dataclass(frozen=True)
class DecodeStep:
    """One verification pass of the target.

    `num_accepted_tokens` is counted before the output is cut at a stop token or at max_tokens, as vLLM counts.
    `output_token_ids` is what the output gained: accepted draft tokens, then the target's token unless cut off.
    """

    draft_token_ids: tuple[int, ...]
    num_accepted_tokens: int
    output_token_ids: tuple[int, ...]


@dataclass
class Generation:
    """A request and its output."""

    prompt_ids: list[int]
    params: SamplingParams
    eos_ids: frozenset[int]
    max_tokens: int  # of the output: `params.max_tokens`, or fewer at the end of the context
    num_speculative_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    steps: list[DecodeStep] = field(default_factory=list)  # one for each target pass after prefill
    finish_reason: str = "length"
    stop_reason: int | None = None  # the stop token; None for EOS and length

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """Number of steps that accepted draft token 1, 2, .. K."""
        return [sum(s.num_accepted_tokens > i for s in self.steps) for i in range(self.num_speculative_tokens)]

    @property
    def num_drafts(self) -> int:
        """Number of steps with draft tokens. The last step before the context is full has none."""
        return sum(bool(s.draft_token_ids) for s in self.steps)

    @property
    def acceptance_length(self) -> float:
        """Mean number of accepted draft tokens per draft, plus the target's own token."""
        return 1 + sum(s.num_accepted_tokens for s in self.steps) / max(self.num_drafts, 1)

    @property
    def is_draft_token(self) -> list[bool]:
        """For each output token: was it a draft token? The first comes from prefill."""
        return [False] + [i < s.num_accepted_tokens for s in self.steps for i in range(len(s.output_token_ids))]


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
) -> Generation:
    """Generates the output of one prompt with speculative decoding.

    Greedy output is the same with any drafter and without one; sampled output has the same distribution.
    `max_model_len` includes the prompt; by default it is the target's max_positions. `sample_draft_tokens` samples them
    from the drafter's distribution instead of taking the argmax. `params.n` and `params.logprobs` are ignored: one call
    generates the tokens of one output.
    """
    limit = target.cfg.max_positions if max_model_len is None else min(max_model_len, target.cfg.max_positions)
    check_prompt(prompt_ids, target.cfg.vocab_size, limit)
    params.check_ids(target.cfg.vocab_size, eos_ids)
    if params.stop or params.grammar is not None:
        raise UserError("the reference has no tokenizer, which stop strings (--stop) and grammars need")
    if drafter is not None:
        check_num_speculative_tokens(num_speculative_tokens)
    rng = torch.Generator()
    if params.seed is None:
        rng.seed()
    else:
        rng.manual_seed(params.seed)
    out = Generation(list(prompt_ids), params, eos_ids, min(params.max_tokens, limit - len(prompt_ids)))
    out.num_speculative_tokens = num_speculative_tokens if drafter is not None else 0
    aux_layer_ids = drafter.cfg.aux_layer_ids if drafter is not None else ()
    draft_params = params if sample_draft_tokens else None

    processed = list(prompt_ids)  # tokens that the target has processed and that stay in the sequence
    logits, aux_hidden_states = run_target(target, processed, 1, aux_layer_ids)
    newest = sample_token(compute_target_probs(logits, out, [])[0], rng)
    finished = append_tokens(out, [newest])
    while not finished:
        k = min(num_speculative_tokens, limit - len(processed) - 2) if drafter is not None else 0
        draft = DraftProposal([], logits[:0])
        if drafter is not None and k > 0:
            draft = propose_draft_tokens(drafter, [*processed, newest], aux_hidden_states, k, draft_params, rng)
        target_input = [*processed, newest, *draft.token_ids]
        logits, aux_hidden_states = run_target(target, target_input, k + 1, aux_layer_ids)
        target_probs = compute_target_probs(logits, out, draft.token_ids)
        num_accepted, bonus = verify_draft_tokens(draft, target_probs, rng)
        num_output_tokens = len(out.token_ids)
        finished = append_tokens(out, [*draft.token_ids[:num_accepted], bonus])
        out.steps.append(DecodeStep(tuple(draft.token_ids), num_accepted, tuple(out.token_ids[num_output_tokens:])))
        processed, newest = target_input[: len(processed) + 1 + num_accepted], bonus
        aux_hidden_states = aux_hidden_states[: len(processed)]
    return out


def run_target(
    target: Decoder, tokens: list[int], num_logits: int, aux_layer_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """One target pass. Returns raw fp64 logits of the last `num_logits` tokens and aux hidden states of all tokens."""
    device = target.embed_tokens.weight.device
    hidden, aux_hidden_states = target(
        torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), causal_attention, aux_layer_ids
    )
    logits = target.compute_logits(hidden[-num_logits:]).detach().cpu().double()
    return logits, hidden[:, :0] if aux_hidden_states is None else aux_hidden_states


def compute_target_probs(logits_KV: Tensor, out: Generation, draft_token_ids: list[int]) -> Tensor:
    """The target's distribution after the output and after each draft token."""
    rows = []
    for i, row in enumerate(logits_KV):
        before = out.token_ids + draft_token_ids[:i]
        rows.append(process_logits(row, out.params, out.prompt_ids, before, out.eos_ids))
    return compute_probs(torch.stack(rows), out.params)


def process_logits(
    logits_V: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_ids: frozenset[int] = frozenset(),
) -> Tensor:
    """Applies min_tokens, biases, penalties, allowed tokens and bad words to the logits after `prompt` and `output`."""
    logits, vocab = logits_V.detach().cpu().double(), logits_V.shape[-1]
    if len(output) < params.min_tokens:
        stops = [t for t in {*eos_ids, *params.stop_token_ids} if t < vocab]  # a tokenizer's EOS may be beyond
        logits = logits.index_fill(0, torch.tensor(stops, dtype=torch.long), -torch.inf)
    if params.logit_bias:
        biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        logits = logits.index_add(0, torch.tensor(list(params.logit_bias)), biases)
    if params.has_penalties:
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=vocab).double()
        seen = counts + torch.bincount(torch.tensor(prompt), minlength=vocab) > 0
        factor = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0).double()
    if params.allowed_token_ids is not None:
        allowed_V = torch.isin(torch.arange(vocab), torch.tensor(params.allowed_token_ids))
        logits = logits.masked_fill(~allowed_V, -torch.inf)
    for *before, last in params.bad_words_token_ids:
        if before == list(output)[len(output) - len(before) :]:
            logits = logits.index_fill(0, torch.tensor(last), -torch.inf)
    return logits


def compute_probs(logits_KV: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities in fp64: temperature, then min-p, top-k and top-p. Greedy: one-hot at the argmax."""
    logits = logits_KV.detach().cpu().double()
    if params.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    logits = (logits - logits.amax(-1, keepdim=True)) / params.temperature  # the maximum is 0: no overflow
    if params.min_p > 0.0:
        logits = logits.masked_fill(logits.exp() < params.min_p, -torch.inf)
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        ordered = logits.sort(dim=-1, descending=True).values
        probs = ordered.softmax(-1)
        dropped = probs.cumsum(-1) - probs >= params.top_p  # the mass before the token suffices
        least = ordered.masked_fill(dropped, torch.inf).amin(-1, keepdim=True)  # ties with it are kept
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits.softmax(-1)


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
    """Drafts K tokens after `tokens`. `aux_hidden_states` are those of all tokens but the newest.

    The row at position p holds the aux hidden states at p and the token at p+1, and predicts the token at p+2.
    P-EAGLE appends K-1 mask rows and reads all K draft tokens off one pass. EAGLE-3 reads one draft token per pass
    and appends a row made of that token and its own output.

    Worked example, tokens a b c (c is the newest), K = 3. The rows of P-EAGLE by position:
    0: (b, aux at a)  1: (c, aux at b)  2: (mask, mask_hidden)  3: (mask, mask_hidden); rows 1, 2, 3 predict.
    """
    cfg, device = drafter.cfg, aux_hidden_states_TN.device
    row_tokens, hidden = tokens[1:], drafter.combine_hidden_states(aux_hidden_states_TN)

    def run_drafter() -> tuple[Tensor, Tensor]:
        positions = torch.arange(len(row_tokens), device=device)
        return drafter(torch.tensor(row_tokens, device=device), hidden, positions, causal_attention)

    if cfg.mask_token_id is not None:
        row_tokens = row_tokens + [cfg.mask_token_id] * (k - 1)
        hidden = torch.cat([hidden, drafter.mask_hidden_states(k - 1)])
        output, _ = run_drafter()
        return sample_from_drafter(drafter, output[-k:], params, rng)

    drafts = []
    for _ in range(k):
        output, next_hidden = run_drafter()
        drafts.append(sample_from_drafter(drafter, output[-1:], params, rng))
        row_tokens = row_tokens + drafts[-1].token_ids
        hidden = torch.cat([hidden, next_hidden[-1:]])
    return DraftProposal([d.token_ids[0] for d in drafts], torch.cat([d.probs_KV for d in drafts]))


def sample_from_drafter(
    drafter: Drafter, output_KD: Tensor, params: SamplingParams | None, rng: torch.Generator
) -> DraftProposal:
    """Samples one draft token per row; ids and probabilities are over the target's vocabulary."""
    draft_probs = compute_probs(drafter.compute_logits(output_KD), params or SamplingParams())
    ids = drafter.to_target_ids(torch.arange(draft_probs.shape[-1], device=output_KD.device)).cpu()
    probs = torch.zeros(len(draft_probs), drafter.cfg.vocab_size, dtype=draft_probs.dtype)
    probs = probs.index_copy(1, ids, draft_probs)
    return DraftProposal([sample_token(p, rng) for p in probs], probs)


def verify_draft_tokens(draft: DraftProposal, target_probs: Tensor, rng: torch.Generator) -> tuple[int, int]:
    """Rejection sampling. Returns the number of accepted draft tokens and the target's token after them.

    Draft token x is accepted with probability min(1, p(x) / q(x)). After the first rejection the next token is
    sampled from max(p - q, 0), which restores the target's distribution exactly. With one-hot p this is greedy
    verification: a draft token is accepted if and only if it is the argmax.
    """
    for i, x in enumerate(draft.token_ids):
        p, q = target_probs[i], draft.probs_KV[i]
        if float(torch.rand((), generator=rng, dtype=torch.float64)) * q[x] >= p[x]:
            return i, sample_token((p - q).clamp(min=0), rng)
    return len(draft.token_ids), sample_token(target_probs[len(draft.token_ids)], rng)


def append_tokens(out: Generation, tokens: list[int]) -> bool:
    """Appends tokens up to the first that finishes the output. Returns whether the output is finished."""
    for token in tokens:
        out.token_ids.append(token)
        finish = find_finish(out)
        if finish is not None:
            out.finish_reason, out.stop_reason = finish
            return True
    return False


def find_finish(out: Generation) -> tuple[str, int | None] | None:
    """finish_reason and stop_reason if the newest token finishes the output."""
    newest = out.token_ids[-1]
    if newest in out.eos_ids and not out.params.ignore_eos:
        return "stop", None
    if newest in out.params.stop_token_ids:
        return "stop", newest
    return ("length", None) if len(out.token_ids) >= out.max_tokens else None
