"""Pieces of the engine -> OpenAI's JSON, whole or chunk by chunk, for chats and for completions.

Knows nothing about HTTP or the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.engine.detokenizer import Detokenizer
from peagle.engine.request import CompletionOutput
from peagle.server.pieces import Piece, Timing
from peagle.server.prompts import Prompts
from peagle.server.tools import Call, ToolReader

NO_CHANCE = -9999.0  # JSON has no infinity; this is what OpenAI's API says instead

JSON = dict[str, Any]
Row = dict[int, float]


@dataclass
class Writer:
    """Of one response."""

    kind: Literal["chat", "text"]
    id: str
    model: str
    prompts: Prompts
    prompt_tokens: int
    total: int  # answers
    alternatives: int | None  # logprobs asked for
    show_tokens: bool
    include_usage: bool
    k: int  # drafts a round at most
    skip_special: bool = True  # tokens, in texts
    make_reader: Callable[[], ToolReader] | None = None  # where tools may be called
    created: int = field(default_factory=lambda: int(time.time()))
    finished: dict[int, tuple[CompletionOutput, Timing]] = field(default_factory=dict)
    _offsets: dict[int, int] = field(default_factory=dict)  # characters of an answer that are out
    _texts: dict[int, Detokenizer] = field(default_factory=dict)
    _readers: dict[int, ToolReader] = field(default_factory=dict)

    # Streaming

    def opening(self) -> list[JSON]:
        """Before the first piece: a chat names the speaker of every answer."""
        if self.kind == "text":
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self.total)
        ]

    def chunk(self, piece: Piece) -> JSON:
        self._note(piece)
        choice: JSON = {"index": piece.index}
        content, calls, reason = self._read(piece)
        if self.kind == "chat":
            delta = {"content": content} if content or self.make_reader is None else {}
            choice["delta"] = {**delta, "tool_calls": calls} if calls else delta
        else:
            choice["text"] = content
        choice["logprobs"] = self._logprobs(piece.index, piece.token_ids, piece.logprobs)
        choice["finish_reason"] = reason
        if piece.output is not None:
            choice["stop_reason"] = piece.output.stop_reason
        if self.show_tokens:
            choice["peagle"] = self._tokens(
                piece.index, piece.token_ids, piece.drafted, piece.finish_reason is not None
            )
        made = self._chunk([choice])
        if self.show_tokens and not self.include_usage and len(self.finished) == self.total:
            made["peagle"] = self.speculation()
        return made

    def closing(self) -> list[JSON]:
        if not self.include_usage:
            return []
        made = self._chunk([])
        made["usage"] = self.usage()
        if self.show_tokens:
            made["peagle"] = self.speculation()
        return [made]

    def _chunk(self, choices: list[JSON]) -> JSON:
        made = self._head("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        made["choices"] = choices
        if self.include_usage:
            made["usage"] = None
        return made

    def _head(self, what: str) -> JSON:
        return {"id": self.id, "object": what, "created": self.created, "model": self.model}

    # Whole

    def whole(self, pieces: Sequence[Piece]) -> JSON:
        choices = []
        for piece in sorted(pieces, key=lambda p: p.index):
            self._note(piece)
            choice: JSON = {"index": piece.index}
            content, calls, reason = self._read(piece)
            if self.kind == "chat":
                choice["message"] = {"role": "assistant", "content": content, "refusal": None}
                if calls:
                    whole = [{name: value for name, value in call.items() if name != "index"} for call in calls]
                    choice["message"] |= {"content": content or None, "tool_calls": whole}
            else:
                choice["text"] = content
            choice["logprobs"] = self._logprobs(piece.index, piece.token_ids, piece.logprobs)
            choice["finish_reason"] = reason
            choice["stop_reason"] = piece.output.stop_reason if piece.output is not None else None
            if self.show_tokens:
                choice["peagle"] = self._tokens(piece.index, piece.token_ids, piece.drafted, final=True)
            choices.append(choice)
        made = self._head("chat.completion" if self.kind == "chat" else "text_completion")
        made |= {"choices": choices, "usage": self.usage()}
        if self.show_tokens:
            made["peagle"] = self.speculation()
        return made

    # Parts of both

    def _read(self, piece: Piece) -> tuple[str, list[JSON], str | None]:
        """What is new of the content, of calls, and of the reason to end. A call is told when it is whole."""
        reason = piece.finish_reason
        if self.make_reader is None:
            return piece.text, [], reason
        reader = self._readers.get(piece.index)
        if reader is None:
            reader = self._readers[piece.index] = self.make_reader()
        before = reader.calls
        said = reader.feed(piece.text, final=reason is not None)
        calls = [
            {
                "index": before + i,
                "id": reader.form.new_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(one for one in said if isinstance(one, Call))
        ]
        content = "".join(one for one in said if isinstance(one, str))
        return content, calls, "tool_calls" if reason == "stop" and reader.calls else reason

    def _note(self, piece: Piece) -> None:
        if piece.output is not None:
            assert piece.timing is not None
            self.finished[piece.index] = (piece.output, piece.timing)

    def usage(self) -> JSON:
        generated = sum(len(output.token_ids) for output, _ in self.finished.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        }

    def speculation(self) -> JSON:
        outputs = [output for output, _ in self.finished.values()]
        timings = [timing for _, timing in self.finished.values()]
        drafts = sum(o.num_drafts for o in outputs)
        held = [sum(counts) for counts in zip(*(o.num_accepted_tokens_per_pos for o in outputs), strict=True)]
        tokens = sum(len(o.token_ids) for o in outputs)
        # a first token takes as long as its prompt does, and says nothing about decoding
        first, last = min(t.first_s or 0.0 for t in timings), max(t.last_s or 0.0 for t in timings)
        seconds = last - first
        return {
            "rounds": sum(o.num_decode_steps for o in outputs),
            "drafts": drafts,
            "num_accepted_tokens_per_pos": held,
            "acceptance_length": round(1 + sum(held) / max(drafts, 1), 4),
            "tokens_per_second": round((tokens - len(outputs)) / seconds, 2) if seconds > 0 else None,
            "k": self.k,
        }

    def _tokens(self, index: int, ids: list[int], drafted: list[bool], final: bool) -> JSON:
        text = self._texts.setdefault(index, self.prompts.detokenizer(self.skip_special))
        texts = []
        for token in ids:
            before = len(text.text)
            text.feed(token)
            texts.append(text.text[before:])
        if final and texts:
            before = len(text.text)
            text.finish()
            texts[-1] += text.text[before:]
        return {"token_ids": ids, "texts": texts, "drafted": drafted}

    def _logprobs(self, index: int, ids: list[int], rows: list[Row] | None) -> JSON | None:
        if rows is None or self.alternatives is None:
            return None
        return self._chat_logprobs(ids, rows) if self.kind == "chat" else self._text_logprobs(index, ids, rows)

    def _chat_logprobs(self, ids: list[int], rows: list[Row]) -> JSON:
        def entry(token: int, value: float) -> JSON:
            text, raw = self.prompts.token_text(token), self.prompts.token_bytes(token)
            return {"token": text, "logprob": max(value, NO_CHANCE), "bytes": raw}

        content = []
        for token, row in zip(ids, rows, strict=True):
            best = [entry(t, row[t]) for t in self._likeliest(row)]
            content.append({**entry(token, row[token]), "top_logprobs": best})
        return {"content": content, "refusal": None}

    def _text_logprobs(self, index: int, ids: list[int], rows: list[Row]) -> JSON:
        tokens = [self.prompts.token_text(token) for token in ids]
        offsets, at = [], self._offsets.get(index, 0)
        for text in tokens:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        best = []
        for token, row in zip(ids, rows, strict=True):
            shown = {self.prompts.token_text(t): max(row[t], NO_CHANCE) for t in self._likeliest(row)}
            best.append({**shown, self.prompts.token_text(token): max(row[token], NO_CHANCE)} if shown else {})
        return {
            "tokens": tokens,
            "token_logprobs": [max(row[token], NO_CHANCE) for token, row in zip(ids, rows, strict=True)],
            "top_logprobs": best if self.alternatives else None,
            "text_offset": offsets,
        }

    def _likeliest(self, row: Row) -> list[int]:
        return sorted(row, key=lambda t: -row[t])[: self.alternatives]
