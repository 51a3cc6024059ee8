"""Answers that match a grammar: JSON schemas, regular expressions, choices.

Knows the grammar library (llguidance, loaded when first needed) and nothing about batches or models. A grammar is
tried in a process of its own when it is made, since no limit of the library's holds for every schema: one that takes
too long, too much memory, or crashes it, is refused like one that is wrong.

The library is told of an EOS of its own, a token that no model says. Its bit in a mask means that the text may end,
whatever the target's own EOS ids are, ordinary text or beyond the vocabulary.

Shapes: N requests, Q rows a request, V vocabulary, W bytes that hold a bit for each token.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.config import Grammar, GrammarLimits
from peagle.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

LIMITS = GrammarLimits()
END = "<|the text may end here|>"
NO_BEGINNING = "no token of this target's can begin an answer that matches it"
TRIED = 512  # grammars whose trial is remembered


def from_json_schema(schema: dict[str, Any] | str | bool, limits: GrammarLimits = LIMITS) -> Grammar:
    """JSON that a schema allows, its keys in the schema's order. Between its parts there is nothing, a space, or a new
    line and its indentation: freer whitespace is where a model that repeats itself would never get any further."""
    if isinstance(schema, str):
        _check_size(schema, limits)  # before anything reads it
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise UserError("grammar: the JSON schema is not valid JSON, or is nested too deeply") from None
    if isinstance(schema, bool):
        if not schema:
            raise UserError("grammar: the JSON schema false allows no answer at all")
        schema = {}
    if not isinstance(schema, dict):
        raise UserError(f"grammar: a JSON schema is an object, not {type(schema).__name__}")
    _check_nesting(schema, limits.max_nesting)
    try:
        source = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise UserError("grammar: the JSON schema holds something that JSON has no form for") from None
    return _tried(Grammar("json_schema", source), limits)


def from_json_object(limits: GrammarLimits = LIMITS) -> Grammar:
    """Any JSON object."""
    return from_json_schema({"type": "object"}, limits)


def from_regex(pattern: str, limits: GrammarLimits = LIMITS) -> Grammar:
    """Text that a regular expression matches from its first to its last character; no look-around, no references."""
    if not isinstance(pattern, str):
        raise UserError(f"grammar: a regular expression is text, not {type(pattern).__name__}")
    return _tried(Grammar("regex", pattern), limits)


def from_choice(choices: Sequence[str], limits: GrammarLimits = LIMITS) -> Grammar:
    """One of these texts."""
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise UserError("grammar: choices are a list of texts, none of them empty")
    return from_regex("|".join(_literal(c) for c in dict.fromkeys(choices)), limits)


def _literal(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _check_size(source: str, limits: GrammarLimits) -> None:
    size = len(source.encode(errors="surrogatepass"))
    if size > limits.max_source_bytes:
        raise UserError(f"grammar: it has {size} bytes, and at most {limits.max_source_bytes} are taken")


def _check_nesting(schema: object, most: int) -> None:
    level: list[object] = [schema]
    for _ in range(most):
        inside: list[object] = []
        for value in level:
            inside += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if not inside:
            return
        level = inside
        if len(level) > LIMITS.max_source_bytes:  # shared parts, or one that holds itself
            break
    raise UserError(f"grammar: the JSON schema is nested more than {most} deep, or has too many parts")


# In a process of its own: stdin holds the grammar and the limits. Every byte is a token, which costs little to read.
TRIAL = r"""
import json, resource, sys
asked = json.load(sys.stdin)
cpu, memory = asked["cpu"], asked["memory"]
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
matcher = LLMatcher(tokens, asked["grammar"], log_level=0, limits=LLParserLimits(**asked["limits"]))
mask = b"" if matcher.is_error() else matcher.compute_bitmask()
error = matcher.get_error()
if not error and not any(mask[:32]):
    error = "nothing but the empty text matches it"
print(json.dumps(error))
"""


def _tried(grammar: Grammar, limits: GrammarLimits) -> Grammar:
    _check_size(grammar.source, limits)
    error = _trial(_written(grammar, limits), limits)
    if error is not None:
        what = "JSON schema" if grammar.kind == "json_schema" else "regular expression"
        raise UserError(f"grammar: the {what} {error}")
    return grammar


@lru_cache(TRIED)
def _trial(written: str, limits: GrammarLimits) -> str | None:
    """What is wrong with a grammar in the library's form."""
    asked = {
        "grammar": written,
        "cpu": limits.compile_cpu_s,
        "memory": limits.compile_memory_bytes,
        "limits": _library_limits(limits),
    }
    command = [sys.executable, "-P", "-c", TRIAL]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=limits.compile_wall_s
        )
        error = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return "is too complex: it takes too long to prepare, so make it smaller"
    return None if not error else f"cannot be followed: {_one_line(error)}"


def _one_line(error: str, nothing: str = "nothing matches it") -> str:
    if "NoExtension" in error:
        return nothing
    exact = re.search(r"^error: (.*)", error, re.MULTILINE)  # of an expression, behind a picture of it
    return " ".join((exact[1] if exact else error).replace("<non-verbose/>", "").split())[:200]


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError("grammar: constrained answers need llguidance: pip install 'peagle[serve]'") from None
    return llguidance


def _library_limits(limits: GrammarLimits) -> dict[str, Any]:
    return {**asdict(limits.parser), "verbose_errors": False}


def _written(grammar: Grammar, limits: GrammarLimits) -> str:
    """The grammar in the library's form."""
    matcher = _library().LLMatcher
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.source)
    # a schema could ask for leniency itself, and then what is not supported would be left out in silence
    firm = {
        "lenient": False,
        "coerce_one_of": False,
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": True,
        "whitespace_pattern": f" |\\n[ \\t]{{0,{limits.max_indent_chars}}}",
    }
    try:
        return matcher.grammar_from_json_schema(grammar.source, overrides=firm)
    except ValueError as error:
        raise UserError(f"grammar: the JSON schema cannot be followed: {_one_line(str(error))}") from None


class Grammars:
    """The grammars of one target. Any thread may `compile`, ahead of time; the rest is the engine's."""

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
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # the one used last at the end
        library = _library()
        self.tokens, self.end = self._read(tokenizer)
        self.executor = library.LLExecutor()

    @staticmethod
    def _read(tokenizer: PreTrainedTokenizerBase) -> tuple[LLTokenizer, int]:
        """The library's tokens, and the one that says that the text may end."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            name = type(tokenizer).__name__
            raise UserError(f"grammar: the target's tokenizer ({name}) has no tokenizer.json, which grammars need")
        from tokenizers import Tokenizer

        try:
            copy = Tokenizer.from_str(backend.to_str())
            copy.no_padding()
            copy.no_truncation()
            copy.add_special_tokens([END])
            end: int = copy.token_to_id(END)  # type: ignore[assignment]
            return _library().LLTokenizer(copy.to_str(), eos_token=end), end
        except Exception as error:  # whatever its reader of the moment raises
            raise UserError(
                f"grammar: the target's tokenizer does not say what its tokens are made of ({_one_line(str(error))})"
            ) from None

    def compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        made = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = made
            if len(self._compiled) > self.limits.max_cached:
                self._compiled.popitem(last=False)
        return made

    def _compile(self, grammar: Grammar) -> LLMatcher:
        library = _library()
        limits = library.LLParserLimits(**_library_limits(self.limits))
        made = library.LLMatcher(self.tokens, _written(grammar, self.limits), log_level=0, limits=limits)
        first = None if made.is_error() else bits_of(made, self)
        if first is None or made.is_error():
            raise UserError(f"grammar: it cannot be followed: {_one_line(made.get_error(), NO_BEGINNING)}")
        if not self.text_in(first[None])[0]:
            raise UserError(f"grammar: it cannot be followed: {NO_BEGINNING}")
        return made

    def renew(self, grammar: Grammar) -> LLMatcher:
        """Compiles anew: those made of one compilation share its memory, and with it the bounds of that."""
        with self._lock:
            self._compiled.pop(grammar, None)
        return self.compile(grammar).deep_copy()

    def matcher(self, grammar: Grammar, ignore_eos: bool = False) -> Matcher:
        return Matcher(self, grammar, ignore_eos)

    @property
    def width(self) -> int:
        """Bytes of a mask as the library writes it."""
        return -(-self.tokens.vocab_size // 32) * 4

    def text_in(self, bits_RW: Tensor) -> Tensor:
        """Which rows allow a token of the target's that is text: bool [R]."""
        text = bits_RW.clone()
        for token in (self.end, *self.eos.tolist()):
            if token // 8 < text.shape[1]:
                text[:, token // 8] &= ~(1 << token % 8) & 0xFF
        text = text[:, : -(-self.vocab_size // 8)]
        if self.vocab_size % 8 and text.shape[1] * 8 > self.vocab_size:
            text[:, -1] &= (1 << self.vocab_size % 8) - 1
        return (text != 0).any(1)


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, grammars: Grammars, grammar: Grammar, ignore_eos: bool) -> None:
        self.grammars, self.grammar, self.ignore_eos = grammars, grammar, ignore_eos
        self.state = grammars.compile(grammar).deep_copy()
        self.taken: list[int] = []
        self.ends = frozenset(grammars.eos.tolist())
        self.trouble = "no token of the target's goes on with an answer that matches"  # why nothing may come

    def take(self, token: int) -> bool:
        """Goes on by a token of the answer; False if it may not come, which is so only where nothing may."""
        if token in self.ends:
            return not self.ignore_eos and self.state.is_accepting()
        if self.state.is_error():
            self.trouble = _one_line(self.state.get_error(), self.trouble)
            return False
        if not self._known(token) or not self.state.consume_token(token):
            return False
        self.taken.append(token)
        return True

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        if not self.state.is_accepting():
            return False
        return self.state.is_stopped() or not self.grammars.text_in(bits_of(self.state, self.grammars)[None])[0]

    def renew(self) -> None:
        try:
            self.state = self.grammars.renew(self.grammar)
        except UserError:  # then it stays as it is, and `take` refuses what comes
            return
        self.state.consume_tokens(self.taken)

    def foreseeable(self, drafts: Sequence[int]) -> list[int]:
        """The drafts up to the first that is not text to the library: it would not recover from such a one."""
        known: list[int] = []
        for token in drafts:
            if not self._known(token):
                break
            known.append(token)
        return known

    def _known(self, token: int) -> bool:
        return 0 <= token < self.grammars.tokens.vocab_size and token != self.grammars.end and token not in self.ends


def bits_of(state: LLMatcher, grammars: Grammars) -> Tensor:
    """What may come next, as the library writes it: uint8 [W]."""
    return torch.frombuffer(bytearray(state.compute_bitmask().ljust(grammars.width, b"\0")), dtype=torch.uint8)


def allowed_rows(asked: Sequence[tuple[Matcher, Sequence[int]]]) -> Tensor:
    """For each request what may come after its answer and after each of its drafts: bits, uint8 [N, Q, W].

    Behind an end, behind a draft that may not come, and where nothing may, all is allowed: such a row is never
    asked, or its token is refused by `take`.
    """
    grammars, rows = asked[0][0].grammars, len(asked[0][1]) + 1
    bits = _library_rows(grammars, asked, rows)
    failed = [n for n, (matcher, _) in enumerate(asked) if matcher.state.is_error()]
    if failed:  # others of the same grammar may have used up what it may have
        again = [asked[n] for n in failed]
        for matcher, _ in again:
            matcher.renew()
        bits[failed] = _library_rows(grammars, again, rows)
    flat = bits.flatten(0, 1)
    anything = (flat == 0xFF).all(1) | ~grammars.text_in(flat)
    heeded = torch.tensor([not matcher.ignore_eos for matcher, _ in asked]).repeat_interleave(rows)
    may_end = (flat[:, grammars.end // 8] >> grammars.end % 8) & heeded
    width = -(-grammars.vocab_size // 8)
    flat = torch.nn.functional.pad(flat, (0, max(width - flat.shape[1], 0)))[:, :width].contiguous()
    for token, bit in [(grammars.end, torch.zeros_like(may_end)), *((t, may_end) for t in grammars.eos.tolist())]:
        if token < grammars.vocab_size:
            byte = flat[:, token // 8]
            byte.copy_(byte & (~(1 << token % 8) & 0xFF) | bit << token % 8)
    flat[anything] = 0xFF
    return flat.view(len(asked), rows, width)


def _library_rows(grammars: Grammars, asked: Sequence[tuple[Matcher, Sequence[int]]], rows: int) -> Tensor:
    bits = torch.full((len(asked), rows, grammars.width), 0xFF, dtype=torch.uint8)
    where = bits.data_ptr(), grammars.width, len(asked) * rows
    drafting, others = [], []
    for n, (matcher, drafts) in enumerate(asked):
        known = matcher.foreseeable(drafts)
        if known:
            drafting.append((matcher.state, n * rows, known))
        else:
            others.append((matcher.state, n * rows))
    if drafting:
        grammars.executor.unsafe_compute_mask_ptr_with_draft_token(drafting, *where)
    if others:
        grammars.executor.unsafe_compute_mask_ptr(others, *where)
    return bits


def unpack(bits_NQW: Tensor, vocab_size: int) -> Tensor:
    """Bits -> bool [N, Q, V], on the device they lie on."""
    each = (bits_NQW[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits_NQW.device)) & 1
    return each.bool().flatten(2)[..., :vocab_size]
