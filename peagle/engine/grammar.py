"""Grammars of constrained outputs: JSON schemas, regular expressions, choices.

A new grammar is test-compiled in a subprocess with CPU and memory limits, because no limit of the grammar library
(llguidance) covers every schema. A grammar that takes too long or too much memory, or crashes the library, is
refused like an invalid one. `grammar_matcher.py` applies grammars to requests.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from peagle.config import Grammar, GrammarLimits
from peagle.errors import UserError

LIMITS = GrammarLimits()
MAX_CACHED_CHECKS = 512


def from_json_schema(schema: dict[str, Any] | str | bool, limits: GrammarLimits = LIMITS) -> Grammar:
    """JSON that a schema allows, keys in the schema's order.

    Whitespace between tokens of JSON is nothing, a space, or a newline with indentation: with free whitespace a model
    that repeats itself could go on forever.
    """
    if isinstance(schema, str):
        _check_size(schema, limits)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise UserError("grammar: the JSON schema is not valid JSON, or is nested too deeply") from None
    if isinstance(schema, bool):
        if not schema:
            raise UserError("grammar: the JSON schema `false` allows no output")
        schema = {}
    if not isinstance(schema, dict):
        raise UserError(f"grammar: a JSON schema must be an object, not {type(schema).__name__}")
    _check_nesting(schema, limits.max_nesting)
    try:
        source = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise UserError("grammar: the JSON schema has a value that JSON cannot represent") from None
    return _check_grammar(Grammar("json_schema", source), limits)


def from_json_object(limits: GrammarLimits = LIMITS) -> Grammar:
    """Any JSON object."""
    return from_json_schema({"type": "object"}, limits)


def from_regex(pattern: str, limits: GrammarLimits = LIMITS) -> Grammar:
    """Text that a regular expression matches in full. Look-around and backreferences are not supported."""
    if not isinstance(pattern, str):
        raise UserError(f"grammar: a regular expression must be a string, not {type(pattern).__name__}")
    return _check_grammar(Grammar("regex", pattern), limits)


def from_choice(choices: Sequence[str], limits: GrammarLimits = LIMITS) -> Grammar:
    """One of these strings."""
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise UserError("grammar: choices must be a list of non-empty strings")
    return from_regex("|".join(_escape(c) for c in dict.fromkeys(choices)), limits)


def _escape(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _check_size(source: str, limits: GrammarLimits) -> None:
    size = len(source.encode(errors="surrogatepass"))
    if size > limits.max_source_bytes:
        raise UserError(f"grammar: it has {size} bytes, but the limit is {limits.max_source_bytes}")


def _check_nesting(schema: object, max_nesting: int) -> None:
    level: list[object] = [schema]
    for _ in range(max_nesting):
        children: list[object] = []
        for value in level:
            children += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if not children:
            return
        level = children
        if len(level) > LIMITS.max_source_bytes:  # shared or recursive Python objects
            break
    raise UserError(f"grammar: the JSON schema is nested more than {max_nesting} levels deep, or has too many values")


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


def _check_grammar(grammar: Grammar, limits: GrammarLimits) -> Grammar:
    _check_size(grammar.source, limits)
    error = _find_error(to_library_grammar(grammar, limits), limits)
    if error is not None:
        kind = "JSON schema" if grammar.kind == "json_schema" else "regular expression"
        raise UserError(f"grammar: the {kind} {error}")
    return grammar


@lru_cache(MAX_CACHED_CHECKS)
def _find_error(library_grammar: str, limits: GrammarLimits) -> str | None:
    job = {
        "grammar": library_grammar,
        "cpu": limits.compile_cpu_s,
        "memory": limits.compile_memory_bytes,
        "limits": library_limits(limits),
    }
    command = [sys.executable, "-P", "-c", CHECK_SCRIPT]
    try:
        process = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=limits.compile_wall_s
        )
        error = json.loads(process.stdout)
    except (subprocess.TimeoutExpired, ValueError):
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


def library_limits(limits: GrammarLimits) -> dict[str, Any]:
    return {**asdict(limits.parser), "verbose_errors": False}


def to_library_grammar(grammar: Grammar, limits: GrammarLimits) -> str:
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
        "whitespace_pattern": f" |\\n[ \\t]{{0,{limits.max_indent_chars}}}",
    }
    try:
        return matcher.grammar_from_json_schema(grammar.source, overrides=overrides)
    except ValueError as error:
        raise UserError(f"grammar: the JSON schema is not supported: {to_one_line(str(error))}") from None
