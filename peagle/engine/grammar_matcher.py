"""Matches outputs against grammars, and computes the tokens that a grammar allows next.

The library (llguidance) gets an end token of its own that no model emits. Its bit in a mask means that the text may
end; it is translated to the target's EOS ids, which may be ordinary text or lie beyond the vocabulary.

Shapes: N requests, Q rows per request, R = N * Q rows, V vocabulary, W mask bytes, one bit per token.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.config import Grammar, GrammarLimits
from peagle.engine.grammar import LIMITS, import_library, library_limits, to_library_grammar, to_one_line
from peagle.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

END_TOKEN = "<|peagle_end_of_text|>"
NO_FIRST_TOKEN = "no token of the target's vocabulary can start a matching output"
NO_NEXT_TOKEN = "no token of the target's vocabulary continues a matching output"


class GrammarCompiler:
    """Compiles grammars for one target and caches them. Any thread may call `compile`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_ids: Collection[int],
        limits: GrammarLimits = LIMITS,
    ) -> None:
        self.vocab_size, self.limits = vocab_size, limits
        self.eos = torch.tensor(sorted(t for t in eos_ids if t < vocab_size), dtype=torch.long)
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # most recently used last
        library = import_library()
        self.tokenizer, self.end_token_id = self._build_tokenizer(tokenizer)
        self.executor = library.LLExecutor()

    @staticmethod
    def _build_tokenizer(tokenizer: PreTrainedTokenizerBase) -> tuple[LLTokenizer, int]:
        """The library's tokenizer, with END_TOKEN, and the id of that token."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            name = type(tokenizer).__name__
            raise UserError(f"grammar: needs a tokenizer with a tokenizer.json, the target's ({name}) has none")
        from tokenizers import Tokenizer

        try:
            copy = Tokenizer.from_str(backend.to_str())
            copy.no_padding()
            copy.no_truncation()
            copy.add_special_tokens([END_TOKEN])
            end: int = copy.token_to_id(END_TOKEN)  # type: ignore[assignment]
            return import_library().LLTokenizer(copy.to_str(), eos_token=end), end
        except Exception as error:  # the library raises many types
            raise UserError(f"grammar: the target's tokenizer is not supported ({to_one_line(str(error))})") from None

    def compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            cached = self._cache.get(grammar)
            if cached is not None:
                self._cache.move_to_end(grammar)
                return cached
        compiled = self._compile(grammar)
        with self._lock:
            self._cache[grammar] = compiled
            if len(self._cache) > self.limits.max_cached:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> LLMatcher:
        library = import_library()
        limits = library.LLParserLimits(**library_limits(self.limits))
        source = to_library_grammar(grammar, self.limits)
        compiled = library.LLMatcher(self.tokenizer, source, log_level=0, limits=limits)
        first = None if compiled.is_error() else self.compute_bitmask(compiled)
        if first is None or compiled.is_error():
            raise UserError(f"grammar: not supported: {to_one_line(compiled.get_error(), NO_FIRST_TOKEN)}")
        if not self.allows_text(first[None])[0]:
            raise UserError(f"grammar: not supported: {NO_FIRST_TOKEN}")
        return compiled

    def recompile(self, grammar: Grammar) -> LLMatcher:
        """Compiles anew: matchers copied from one compilation share its memory limits."""
        with self._lock:
            self._cache.pop(grammar, None)
        return self.compile(grammar).deep_copy()

    def create_matcher(self, grammar: Grammar, ignore_eos: bool = False) -> GrammarMatcher:
        return GrammarMatcher(self, grammar, ignore_eos)

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask in the library's format."""
        return -(-self.tokenizer.vocab_size // 32) * 4

    def compute_bitmask(self, state: LLMatcher) -> Tensor:
        """Allowed next tokens in the library's format: uint8 [W]."""
        return torch.frombuffer(bytearray(state.compute_bitmask().ljust(self.mask_bytes, b"\0")), dtype=torch.uint8)

    def allows_text(self, bits_RW: Tensor) -> Tensor:
        """Whether each row allows a token of the target that is neither EOS nor END_TOKEN: bool [R]."""
        text = bits_RW.clone()
        for token in (self.end_token_id, *self.eos.tolist()):
            if token // 8 < text.shape[1]:
                text[:, token // 8] &= ~(1 << token % 8) & 0xFF
        text = text[:, : -(-self.vocab_size // 8)]
        if self.vocab_size % 8 and text.shape[1] * 8 > self.vocab_size:
            text[:, -1] &= (1 << self.vocab_size % 8) - 1
        return (text != 0).any(1)


class GrammarMatcher:
    """The state of one output in its grammar."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, ignore_eos: bool) -> None:
        self.compiler, self.grammar, self.ignore_eos = compiler, grammar, ignore_eos
        self.state = compiler.compile(grammar).deep_copy()
        self.token_ids: list[int] = []
        self.eos_ids = frozenset(compiler.eos.tolist())
        self.error = NO_NEXT_TOKEN  # the reason if `accept_token` returns False

    def accept_token(self, token: int) -> bool:
        """Advances by a token of the output. False if the grammar forbids it: only where it allows no token."""
        if token in self.eos_ids:
            return not self.ignore_eos and self.state.is_accepting()
        if self.state.is_error():
            self.error = to_one_line(self.state.get_error(), self.error)
            return False
        if not self._is_text(token) or not self.state.consume_token(token):
            return False
        self.token_ids.append(token)
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the output matches and nothing may follow."""
        if not self.state.is_accepting():
            return False
        if self.state.is_stopped():
            return True
        return not self.compiler.allows_text(self.compiler.compute_bitmask(self.state)[None])[0]

    def recompile(self) -> None:
        try:
            self.state = self.compiler.recompile(self.grammar)
        except UserError:  # the state keeps its error, and `accept_token` returns False
            return
        self.state.consume_tokens(self.token_ids)

    def leading_text(self, draft_token_ids: Sequence[int]) -> list[int]:
        """The draft tokens before the first that is not text. The library does not recover from such a token."""
        leading: list[int] = []
        for token in draft_token_ids:
            if not self._is_text(token):
                break
            leading.append(token)
        return leading

    def _is_text(self, token: int) -> bool:
        known = 0 <= token < self.compiler.tokenizer.vocab_size
        return known and token != self.compiler.end_token_id and token not in self.eos_ids


MatcherStates = Sequence[tuple[GrammarMatcher, Sequence[int]]]  # matcher and draft token ids


def compute_bitmasks(states: MatcherStates) -> Tensor:
    """Allowed tokens after each output and after each of its draft tokens: uint8 [N, Q, W].

    Rows after an end, after a forbidden draft token, and where the grammar allows nothing allow everything: such a row
    is never used, or `accept_token` refuses its token.
    """
    compiler, num_rows = states[0][0].compiler, len(states[0][1]) + 1
    bits = _compute_library_bitmasks(compiler, states, num_rows)
    failed = [n for n, (matcher, _) in enumerate(states) if matcher.state.is_error()]
    if failed:  # requests of the same grammar may have used up its limits
        retried = [states[n] for n in failed]
        for matcher, _ in retried:
            matcher.recompile()
        bits[failed] = _compute_library_bitmasks(compiler, retried, num_rows)
    flat = bits.flatten(0, 1)
    unconstrained = (flat == 0xFF).all(1) | ~compiler.allows_text(flat)
    heeds_eos = torch.tensor([not matcher.ignore_eos for matcher, _ in states]).repeat_interleave(num_rows)
    end = compiler.end_token_id
    may_end = (flat[:, end // 8] >> end % 8) & heeds_eos
    width = -(-compiler.vocab_size // 8)
    flat = torch.nn.functional.pad(flat, (0, max(width - flat.shape[1], 0)))[:, :width].contiguous()
    for token, bit in [(end, torch.zeros_like(may_end)), *((t, may_end) for t in compiler.eos.tolist())]:
        if token < compiler.vocab_size:
            byte = flat[:, token // 8]
            byte.copy_(byte & (~(1 << token % 8) & 0xFF) | bit << token % 8)
    flat[unconstrained] = 0xFF
    return flat.view(len(states), num_rows, width)


def _compute_library_bitmasks(compiler: GrammarCompiler, states: MatcherStates, num_rows: int) -> Tensor:
    bits = torch.full((len(states), num_rows, compiler.mask_bytes), 0xFF, dtype=torch.uint8)
    destination = bits.data_ptr(), compiler.mask_bytes, len(states) * num_rows
    with_drafts, without_drafts = [], []
    for n, (matcher, draft_token_ids) in enumerate(states):
        leading = matcher.leading_text(draft_token_ids)
        if leading:
            with_drafts.append((matcher.state, n * num_rows, leading))
        else:
            without_drafts.append((matcher.state, n * num_rows))
    if with_drafts:
        compiler.executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *destination)
    if without_drafts:
        compiler.executor.unsafe_compute_mask_ptr(without_drafts, *destination)
    return bits


def unpack_bitmasks(bits_NQW: Tensor, vocab_size: int) -> Tensor:
    """uint8 [N, Q, W] -> bool [N, Q, V], on the same device."""
    bits = (bits_NQW[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits_NQW.device)) & 1
    return bits.bool().flatten(2)[..., :vocab_size]
