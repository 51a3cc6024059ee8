"""The reference with text, stop strings, grammars and logprobs, which the package's reference leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from peagle.config import SamplingParams
from peagle.models.decoder import Decoder
from peagle.speculative import reference

Decode = Callable[[list[int]], str]


class Constraint(Protocol):
    """The grammar of a request."""

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        """Tokens that may follow `output`, EOS ids included where the text may end: bool [V].
        None if no token may follow, or if `output` itself violates the grammar."""

    def complete(self, output: Sequence[int]) -> bool:
        """Whether `output` matches and nothing may follow it."""


@dataclass
class TextGeneration(reference.Generation):
    stop_reason: int | str | None = None  # type: ignore[assignment]  # the stop token or stop string
    text: str | None = None  # set if there is a `decode`; without the stop token or stop string
    logprobs: list[dict[int, float]] = field(default_factory=list)  # empty unless `params.logprobs` is set


def generate(
    target: Decoder,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    eos_ids: frozenset[int] = frozenset(),
    *options: Any,
    decode: Decode | None = None,
    constraint: Constraint | None = None,
    **named_options: Any,
) -> TextGeneration:
    """`reference.generate`, which also finishes at stop strings and at the end of a grammar.
    `constraint`: `params.grammar` for this vocabulary."""
    assert decode is not None or not params.stop
    assert constraint is not None or params.grammar is None
    raw_KV, text, stop_reason, logprobs = torch.empty(0), None, None, []
    compute_target_probs, append_tokens = reference.compute_target_probs, reference.append_tokens

    def compute_constrained_probs(logits_KV: Tensor, out: reference.Generation, draft_token_ids: list[int]) -> Tensor:
        nonlocal raw_KV
        raw_KV = logits_KV
        if constraint is None:
            return compute_target_probs(logits_KV, out, draft_token_ids)
        rows = []
        for i, row in enumerate(logits_KV):
            before = out.token_ids + draft_token_ids[:i]
            allowed = constraint.allowed(before)
            rows.append(process_logits(row, out.params, out.prompt_ids, before, out.eos_ids, allowed))
        return reference.compute_probs(torch.stack(rows), out.params)

    def append_text_tokens(out: reference.Generation, tokens: list[int]) -> bool:
        nonlocal text, stop_reason
        for token, logits in zip(tokens, raw_KV, strict=False):  # row i of the raw logits belongs to token i
            if constraint is not None and constraint.allowed(out.token_ids) is None:
                out.finish_reason, text = "error", decode(out.token_ids) if decode is not None else None
                return True
            append_tokens(out, [token])
            if params.logprobs is not None:
                logprobs.append(compute_token_logprobs(logits, token, params.logprobs))
            finish = find_finish(out, params.stop, decode, constraint)
            if finish is not None:
                out.finish_reason, stop_reason, text = finish
                return True
        return False

    hooks = {"compute_target_probs": compute_constrained_probs, "append_tokens": append_text_tokens}
    with mock.patch.multiple(reference, **hooks):
        tokens_only = replace(params, stop=(), grammar=None)
        out = reference.generate(target, prompt_ids, tokens_only, eos_ids, *options, **named_options)
    return TextGeneration(**{**vars(out), "stop_reason": stop_reason}, text=text, logprobs=logprobs)


def process_logits(
    logits_V: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_ids: frozenset[int],
    allowed_V: Tensor | None,
) -> Tensor:
    """`reference.process_logits`, then the grammar, which wins where it allows nothing but the banned stop tokens."""
    if allowed_V is None:
        return reference.process_logits(logits_V, params, prompt, output, eos_ids)
    stops = {*eos_ids, *params.stop_token_ids}
    if all(token in stops for token in allowed_V.nonzero()[:, 0].tolist()):
        params = replace(params, min_tokens=0)
    return reference.process_logits(logits_V, params, prompt, output, eos_ids).masked_fill(~allowed_V, -torch.inf)


def compute_token_logprobs(logits_V: Tensor, token: int, num_logprobs: int) -> dict[int, float]:
    """Log-probability of the token first, then of the `num_logprobs` likeliest tokens."""
    logprobs = logits_V.double().log_softmax(-1)
    likeliest = logprobs.sort(descending=True, stable=True).indices[:num_logprobs].tolist()
    return {t: float(logprobs[t]) for t in (token, *likeliest)}


def find_finish(
    out: reference.Generation, stop: Sequence[str], decode: Decode | None, constraint: Constraint | None = None
) -> tuple[str, int | str | None, str | None] | None:
    """finish_reason, stop_reason and text if the newest token finishes the output."""
    output = out.token_ids

    def to_text(tokens: list[int]) -> str | None:
        return None if decode is None else decode(tokens)

    finish = reference.find_finish(out)
    if finish is not None and finish[0] == "stop":
        return *finish, to_text(output[:-1])
    if decode is not None and (found := find_stop_string(decode, output, stop, out.params.min_tokens)) is not None:
        return "stop", *found
    if constraint is not None and constraint.complete(output):
        return "stop", None, to_text(output)
    return None if finish is None else (*finish, to_text(output))


def find_stop_string(decode: Decode, output: list[int], stop: Sequence[str], min_tokens: int) -> tuple[str, str] | None:
    """The stop string that ends first, and the text before it.

    A character with missing bytes decodes to U+FFFD and does not count yet: it matches no stop string, and it is
    not part of the text of the first `min_tokens` tokens if a later token completes it.
    """

    def complete_text(tokens: list[int]) -> str:
        return decode(tokens).rstrip("\ufffd")

    if not stop:
        return None
    text, min_chars = complete_text(output), len(complete_text(output[:min_tokens]))
    matches = []
    for i, string in enumerate(stop):
        start = text.find(string, max(0, min_chars + 1 - len(string)))
        if start >= 0:
            matches.append((start + len(string), i, start))
    if not matches:
        return None
    _, i, start = min(matches)
    return stop[i], text[:start]
