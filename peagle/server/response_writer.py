"""Writes the JSON of chat and text completions, whole or as stream chunks, from the engine's deltas."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import msgspec

from peagle.config import SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.server.request_stream import Completion, OutputDelta
from peagle.server.tokenization import ServerTokenizer
from peagle.server.tool_calls import ParsedToolCall, ToolCallParser

MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have

JSON = dict[str, Any]
TokenLogprobs = dict[int, float]


def encode_event(value: JSON) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


@dataclass
class OpenAIResponseWriter:
    """Writes one response."""

    kind: Literal["chat", "text"]
    id: str
    model: str
    tokenizer: ServerTokenizer
    num_prompt_tokens: int
    num_completions: int
    params: SamplingParams
    include_tokens: bool  # the `peagle` extension
    include_usage: bool
    max_speculative_tokens: int  # of the engine
    new_tool_parser: Callable[[], ToolCallParser] | None = None  # if the completion may call tools
    created: int = field(default_factory=lambda: int(time.time()))
    finished: dict[int, Completion] = field(default_factory=dict)
    _text_offsets: Counter[int] = field(default_factory=Counter)  # characters written, per completion
    _detokenizers: dict[int, Detokenizer] = field(default_factory=dict)
    _tool_parsers: dict[int, ToolCallParser] = field(default_factory=dict)

    def first_events(self) -> bytes:
        """Returns the stream events before the first delta: a chat names the role of every completion."""
        if self.kind == "text":
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._encode_chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self.num_completions)
        )

    def event(self, delta: OutputDelta) -> bytes:
        """Returns the stream event of a delta."""
        choice = self._build_choice(delta, is_chunk=True)
        is_last = not self.include_usage and len(self.finished) == self.num_completions
        return self._encode_chunk([choice], is_last)

    def last_events(self) -> bytes:
        """Returns the event after the last delta, which holds the usage if the client asked for it."""
        return self._encode_chunk([], is_last=True) if self.include_usage else b""

    def whole_response(self, deltas: Sequence[OutputDelta]) -> JSON:
        """Returns the response without streaming."""
        choices = [self._build_choice(delta, is_chunk=False) for delta in sorted(deltas, key=lambda d: d.index)]
        response = self._build_head("chat.completion" if self.kind == "chat" else "text_completion")
        response |= {"choices": choices, "usage": self.usage()}
        if self.include_tokens:
            response["peagle"] = self.speculation_stats()
        return response

    def _build_head(self, object_name: str) -> JSON:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}

    @cached_property
    def _encoded_chunk_head(self) -> bytes:
        """The beginning of every chunk."""
        head = self._build_head("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        return encode_event(head).removesuffix(b"}\n\n") + b","

    def _encode_chunk(self, choices: list[JSON], is_last: bool = False) -> bytes:
        fields: JSON = {"choices": choices}
        if self.include_usage:
            fields["usage"] = self.usage() if is_last else None
        if self.include_tokens and is_last:
            fields["peagle"] = self.speculation_stats()
        return self._encoded_chunk_head + msgspec.json.encode(fields)[1:] + b"\n\n"

    def _build_choice(self, delta: OutputDelta, is_chunk: bool) -> JSON:
        content, calls, finish_reason = self._parse_tools(delta)
        if self.kind == "text":
            body: JSON = {"text": content}
        elif is_chunk:
            message: JSON = {"content": content} if content or self.new_tool_parser is None else {}
            body = {"delta": {**message, "tool_calls": calls} if calls else message}
        else:
            message = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                calls = [{name: value for name, value in call.items() if name != "index"} for call in calls]
                message |= {"content": content or None, "tool_calls": calls}
            body = {"message": message}
        logprobs = None
        if delta.logprobs is not None:
            rows = list(zip(delta.token_ids, delta.logprobs, strict=True))
            is_chat = self.kind == "chat"
            logprobs = self._build_chat_logprobs(rows) if is_chat else self._build_text_logprobs(delta.index, rows)
        choice: JSON = {"index": delta.index, **body, "logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            self.finished[delta.index] = delta.completion
            choice["stop_reason"] = delta.completion.stop_reason
        if self.include_tokens:
            choice["peagle"] = self._build_tokens(delta)
        return choice

    def _parse_tools(self, delta: OutputDelta) -> tuple[str, list[JSON], str | None]:
        """Returns new content, new tool calls and the finish reason. A call appears when it is complete."""
        finish_reason = delta.finish_reason
        if self.new_tool_parser is None:
            return delta.text, [], finish_reason
        if delta.index not in self._tool_parsers:
            self._tool_parsers[delta.index] = self.new_tool_parser()
        parser = self._tool_parsers[delta.index]
        first_index = parser.num_calls
        parts = parser.feed(delta.text, final=finish_reason is not None)
        calls = [
            {
                "index": first_index + i,
                "id": parser.format.new_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(part for part in parts if isinstance(part, ParsedToolCall))
        ]
        content = "".join(part for part in parts if isinstance(part, str))
        return content, calls, "tool_calls" if finish_reason == "stop" and parser.num_calls else finish_reason

    def usage(self) -> JSON:
        num_output_tokens = sum(len(completion.token_ids) for completion in self.finished.values())
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self.num_prompt_tokens + num_output_tokens,
        }

    def speculation_stats(self) -> JSON:
        """Returns the `peagle` object of the response. The rate leaves out the first tokens: they measure prefill."""
        completions = self.finished.values()
        max_k, limit = self.max_speculative_tokens, self.params.max_speculative_tokens
        num_drafts = sum(c.num_drafts for c in completions)
        accepted_per_step = [num_accepted for c in completions for num_accepted in c.accepted_per_step]
        accepted_per_pos = [sum(n > i for n in accepted_per_step) for i in range(max_k)]
        num_tokens = sum(len(c.token_ids) for c in completions)
        seconds = max(c.last_token_s or 0.0 for c in completions) - min(c.first_token_s or 0.0 for c in completions)
        return {
            "num_decode_steps": sum(c.num_decode_steps for c in completions),
            "num_drafts": num_drafts,
            "num_accepted_tokens_per_pos": accepted_per_pos,
            "acceptance_length": round(1 + sum(accepted_per_pos) / max(num_drafts, 1), 4),
            "tokens_per_second": round((num_tokens - len(completions)) / seconds, 2) if seconds > 0 else None,
            "num_speculative_tokens": max_k if limit is None else min(limit, max_k),
        }

    def _build_tokens(self, delta: OutputDelta) -> JSON:
        if delta.index not in self._detokenizers:
            self._detokenizers[delta.index] = self.tokenizer.new_detokenizer(replace(self.params, stop=()))
        texts = self._detokenizers[delta.index].add_separately(delta.token_ids, delta.finish_reason is not None)
        return {"token_ids": delta.token_ids, "texts": texts, "is_draft_token": delta.is_draft_token}

    def _build_chat_logprobs(self, rows: list[tuple[int, TokenLogprobs]]) -> JSON:
        def entry(token_id: int, row: TokenLogprobs) -> JSON:
            text, raw = self.tokenizer.token_text(token_id), self.tokenizer.token_bytes(token_id)
            return {"token": text, "logprob": max(row[token_id], MIN_LOGPROB), "bytes": raw}

        content = [
            {**entry(token_id, row), "top_logprobs": [entry(t, row) for t in self._top_tokens(row)]}
            for token_id, row in rows
        ]
        return {"content": content, "refusal": None}

    def _build_text_logprobs(self, index: int, rows: list[tuple[int, TokenLogprobs]]) -> JSON:
        tokens = [self.tokenizer.token_text(token_id) for token_id, _ in rows]
        logprobs = [max(row[token_id], MIN_LOGPROB) for token_id, row in rows]
        *offsets, self._text_offsets[index] = accumulate(map(len, tokens), initial=self._text_offsets[index])
        top_logprobs = []
        for token, logprob, (_, row) in zip(tokens, logprobs, rows, strict=True):
            top = {self.tokenizer.token_text(t): max(row[t], MIN_LOGPROB) for t in self._top_tokens(row)}
            top_logprobs.append({**top, token: logprob})
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top_logprobs if self.params.logprobs else None,
            "text_offset": offsets,
        }

    def _top_tokens(self, row: TokenLogprobs) -> list[int]:
        return sorted(row, key=lambda t: -row[t])[: self.params.logprobs]
