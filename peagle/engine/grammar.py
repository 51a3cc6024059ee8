"""Grammars of constrained outputs: JSON schemas, regular expressions; and the tokens that they allow next.

A new grammar is test-compiled in a subprocess with CPU and memory limits, because no limit of the grammar library
(llguidance) covers every schema. A grammar that takes too long or too much memory, or crashes the library, is
refused like an invalid one.

The library gets an end token of its own that no model emits. Its bit in a mask means that the text may end; it is
translated to the target's EOS ids, which may be ordinary text or lie beyond the vocabulary.

Shapes: N requests, Q rows per request, R = N * Q rows, V vocabulary, W mask bytes, one bit per token.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from peagle.config import Grammar, GrammarLimits
from peagle.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

LIMITS = GrammarLimits()
MAX_CACHED_CHECKS = 512
CANCEL_POLL_S = 0.05  # a cancelled check ends within this time
END_TOKEN = "<|peagle_end_of_text|>"
NO_FIRST_TOKEN = "no token of the target's vocabulary can start a matching output"
NO_NEXT_TOKEN = "no token of the target's vocabulary continues a matching output"

_errors: OrderedDict[Grammar, str | None] = OrderedDict()  # results of the latest checks, the oldest first


def from_json_schema(schema: dict[str, Any] | bool) -> Grammar:
    """JSON that a schema allows, keys in the schema's order.

    Whitespace between tokens of JSON is nothing, a space, or a newline with indentation: with free whitespace a model
    that repeats itself could go on forever.
    """
    return check_grammar(json_schema_grammar(schema))


def json_schema_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """As `from_json_schema`, but the grammar still has to be checked."""
    if isinstance(schema, bool):
        if not schema:
            raise UserError("grammar: the JSON schema `false` allows no output")
        schema = {}
    if not isinstance(schema, dict):
        raise UserError(f"grammar: a JSON schema must be an object, not {type(schema).__name__}")
    _check_nesting(schema)
    try:
        source = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise UserError("grammar: the JSON schema has a value that JSON cannot represent") from None
    return Grammar("json_schema", source)


def from_regex(pattern: str) -> Grammar:
    """Text that a regular expression matches in full. Look-around and backreferences are not supported."""
    if not isinstance(pattern, str):
        raise UserError(f"grammar: a regular expression must be a string, not {type(pattern).__name__}")
    return check_grammar(Grammar("regex", pattern))


def _check_nesting(schema: object) -> None:
    level: list[object] = [schema]
    for _ in range(LIMITS.max_nesting):
        children: list[object] = []
        for value in level:
            children += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if not children:
            return
        level = children
        if len(level) > LIMITS.max_source_bytes:  # shared or recursive Python objects
            break
    deepest = LIMITS.max_nesting
    raise UserError(f"grammar: the JSON schema is nested more than {deepest} levels deep, or has too many values")


# Runs in a subprocess, with the grammar and the limits on stdin. Every byte is a token, which loads fast.
CHECK_SCRIPT = r"""
import json, resource, sys
job = json.load(sys.stdin)
cpu, memory = job["cpu"], job["memory"]
resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
class Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [bytes([b]) for b in range(256)] + [b"<end>"]
    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())
tokens = LLTokenizer(TokenizerWrapper(Bytes()))
matcher = LLMatcher(tokens, job["grammar"], log_level=0, limits=LLParserLimits(**job["limits"]))
mask = b"" if matcher.is_error() else matcher.compute_bitmask()
error = matcher.get_error()
if not error and not any(mask[:32]):
    error = "only the empty text matches it"
print(json.dumps(error))
"""


def check_grammar(grammar: Grammar, cancelled: threading.Event | None = None) -> Grammar:
    """Raises UserError if the grammar is not supported. Setting `cancelled` ends the check from another thread."""
    size = len(grammar.source.encode(errors="surrogatepass"))
    if size > LIMITS.max_source_bytes:
        raise UserError(f"grammar: it has {size} bytes, but the limit is {LIMITS.max_source_bytes}")
    try:
        error = _errors[grammar]
    except KeyError:
        error = _errors[grammar] = _find_error(to_library_grammar(grammar), cancelled or threading.Event())
        while len(_errors) > MAX_CACHED_CHECKS:
            _errors.popitem(last=False)
    if error is not None:
        kind = "JSON schema" if grammar.kind == "json_schema" else "regular expression"
        raise UserError(f"grammar: the {kind} {error}")
    return grammar


def is_checked(grammar: Grammar) -> bool:
    """Whether `check_grammar` knows the result already."""
    return grammar in _errors


def _find_error(library_grammar: str, cancelled: threading.Event) -> str | None:
    job = {
        "grammar": library_grammar,
        "cpu": LIMITS.compile_cpu_s,
        "memory": LIMITS.compile_memory_bytes,
        "limits": library_limits(),
    }
    command = [sys.executable, "-P", "-c", CHECK_SCRIPT]
    pipe, deadline = subprocess.PIPE, time.monotonic() + LIMITS.compile_wall_s
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        text: str | None = json.dumps(job)
        while True:
            try:
                output, _ = process.communicate(text, timeout=CANCEL_POLL_S)
                break
            except subprocess.TimeoutExpired:
                text = None  # it is being sent
                if cancelled.is_set() or time.monotonic() > deadline:
                    process.kill()
    if cancelled.is_set():
        raise UserError("grammar: the check was cancelled")
    try:
        error = json.loads(output)
    except ValueError:
        return "is too complex and takes too long to compile: make it smaller"
    return None if not error else f"is not supported: {to_one_line(error)}"


def to_one_line(error: str, if_nothing_matches: str = "nothing matches it") -> str:
    """An error of the library without its picture of the expression."""
    if "NoExtension" in error:
        return if_nothing_matches
    message = re.search(r"^error: (.*)", error, re.MULTILINE)
    return " ".join((message[1] if message else error).replace("<non-verbose/>", "").split())[:200]


def import_library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError("grammar: constrained outputs need llguidance: pip install 'peagle[serve]'") from None
    return llguidance


def library_limits() -> dict[str, Any]:
    return {**asdict(LIMITS.parser), "verbose_errors": False}


def to_library_grammar(grammar: Grammar) -> str:
    """The grammar in llguidance's own format."""
    matcher = import_library().LLMatcher
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.source)
    # `overrides` beat options inside the schema, which could silently drop unsupported keywords ("lenient").
    overrides = {
        "lenient": False,
        "coerce_one_of": False,
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": True,
        "whitespace_pattern": f" |\\n[ \\t]{{0,{LIMITS.max_indent_chars}}}",
    }
    try:
        return matcher.grammar_from_json_schema(grammar.source, overrides=overrides)
    except ValueError as error:
        raise UserError(f"grammar: the JSON schema is not supported: {to_one_line(str(error))}") from None


class GrammarCompiler:
    """Compiles grammars for one target; `compile` caches the latest. Any thread may call it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self.eos = torch.tensor(sorted(t for t in eos_ids if t < vocab_size), dtype=torch.long)
        self.compile = lru_cache(LIMITS.max_cached)(self._compile)
        self.tokenizer, self.end_token_id = self._build_tokenizer(tokenizer)
        self.executor = import_library().LLExecutor()

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

    def _compile(self, grammar: Grammar) -> LLMatcher:
        library = import_library()
        limits = library.LLParserLimits(**library_limits())
        source = to_library_grammar(grammar)
        compiled = library.LLMatcher(self.tokenizer, source, log_level=0, limits=limits)
        first = None if compiled.is_error() else self.compute_bitmask(compiled)
        if first is None or compiled.is_error():
            raise UserError(f"grammar: not supported: {to_one_line(compiled.get_error(), NO_FIRST_TOKEN)}")
        if not self.keep_text(first[None])[0]:
            raise UserError(f"grammar: not supported: {NO_FIRST_TOKEN}")
        return compiled

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask in the library's format."""
        return -(-self.tokenizer.vocab_size // 32) * 4

    def compute_bitmask(self, state: LLMatcher) -> Tensor:
        """Allowed next tokens in the library's format: uint8 [W]."""
        return torch.frombuffer(bytearray(state.compute_bitmask().ljust(self.mask_bytes, b"\0")), dtype=torch.uint8)

    def keep_text(self, bits_RW: Tensor) -> Tensor:
        """Removes EOS, END_TOKEN and tokens that the target lacks from masks in the library's format, in place. Returns
        whether each row allows any other token: bool [R]."""
        for token in (self.end_token_id, *self.eos.tolist()):
            if token // 8 < bits_RW.shape[1]:
                bits_RW[:, token // 8] &= ~(1 << token % 8) & 0xFF
        if bits_RW.shape[1] * 8 > self.vocab_size:
            bits_RW[:, -(-self.vocab_size // 8) :] = 0
            if self.vocab_size % 8:
                bits_RW[:, self.vocab_size // 8] &= (1 << self.vocab_size % 8) - 1
        return torch.from_numpy(bits_RW.numpy().view(np.uint32).any(1))


class GrammarMatcher:
    """The state of one output in its grammar."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, ignore_eos: bool = False) -> None:
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
        if not self.is_text(token) or not self.state.consume_token(token):
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
        return not self.compiler.keep_text(self.compiler.compute_bitmask(self.state)[None])[0]

    def recompile(self) -> None:
        """Compiles anew: matchers copied from one compilation share its memory limits."""
        self.compiler.compile.cache_clear()
        try:
            self.state = self.compiler.compile(self.grammar).deep_copy()
        except UserError:  # the state keeps its error, and `accept_token` returns False
            return
        self.state.consume_tokens(self.token_ids)

    def is_text(self, token: int) -> bool:
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
    is_unconstrained = (flat.numpy().view(np.uint32) == 0xFFFFFFFF).all(1)
    heeds_eos = torch.tensor([not matcher.ignore_eos for matcher, _ in states]).repeat_interleave(num_rows)
    may_end = (flat[:, compiler.end_token_id // 8] >> compiler.end_token_id % 8) & heeds_eos
    allows_text = compiler.keep_text(flat)
    width = -(-compiler.vocab_size // 8)
    flat = torch.nn.functional.pad(flat, (0, width - flat.shape[1])).contiguous()  # cuts tokens that the target lacks
    for token in compiler.eos.tolist():
        flat[:, token // 8] |= may_end << token % 8
    flat.numpy()[is_unconstrained | ~allows_text.numpy()] = 0xFF  # torch takes milliseconds for it
    return flat.view(len(states), num_rows, width)


def _compute_library_bitmasks(compiler: GrammarCompiler, states: MatcherStates, num_rows: int) -> Tensor:
    bits = torch.full((len(states), num_rows, compiler.mask_bytes), 0xFF, dtype=torch.uint8)
    destination = bits.data_ptr(), compiler.mask_bytes, len(states) * num_rows
    with_drafts, without_drafts = [], []
    for n, (matcher, draft_token_ids) in enumerate(states):
        leading = list(takewhile(matcher.is_text, draft_token_ids))  # the library does not recover from other tokens
        if leading:
            with_drafts.append((matcher.state, n * num_rows, leading))
        else:
            without_drafts.append((matcher.state, n * num_rows))
    if with_drafts:
        compiler.executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *destination)
    if without_drafts:
        compiler.executor.unsafe_compute_mask_ptr(without_drafts, *destination)
    return bits


def forbid_tokens(masks_RW: Tensor, token_ids: Collection[int], vocab_size: int) -> None:
    """Removes tokens from masks in place, except where a mask allows no other token."""
    others = masks_RW.clone()
    for token in (t for t in token_ids if t < vocab_size):
        others[:, token // 8] &= ~(1 << token % 8) & 0xFF
    in_vocab = others.clone()
    if vocab_size % 8:
        in_vocab[:, vocab_size // 8] &= (1 << vocab_size % 8) - 1
    masks_RW.copy_(torch.where((in_vocab != 0).any(1, keepdim=True), others, masks_RW))
