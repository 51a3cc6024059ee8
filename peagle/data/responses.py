"""`peagle data`: generates the target's responses to prompts; each conversation is a row.

`write_responses` finds user errors before it loads a model; `ResponseWriter.run` is the loop. The seed of a response
depends only on (run seed, prompt id, sample, turn), so a resumed run writes the rows of an uninterrupted one.

Token ids of a conversation of two turns: the template renders the prompt of the second turn from the whole text, as a
server does. Usually that starts with the ids of the first turn, and the spans stay valid:

    turn 1   prompt [0, 5)   response [5, 9)     ids 0..8
    turn 2   prompt [0, 14)  response [14, 20)   ids 0..19, spans [5, 9) and [14, 20)

If the tokenizer encodes a response's text differently from the generated tokens, the earlier spans are located again.
"""

import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Self

from peagle import config
from peagle.checkpoints.target import read_target_config, target_fingerprint
from peagle.config import EndpointSettings, ResponseEngineSettings, ResponseSettings, SamplingParams
from peagle.data import generators
from peagle.data.chat_format import ChatFormat, load_chat_format
from peagle.data.generators import LOOP, EndpointGenerator, EngineGenerator, GenerationRequest, GenerationResult
from peagle.data.prompts import Prompt, PromptSet, read_excluded_ids, read_prompts
from peagle.data.response_file import DataSummary, ResponseFile, ResponseRow, replace_text, sidecar_path
from peagle.display import ProgressBar
from peagle.errors import UserError
from peagle.hub.resolve import resolve_target
from peagle.versions import installed_versions

ResponseGenerator = EngineGenerator | EndpointGenerator

SEED_BITS = 31  # larger seeds are rejected by some servers
ENCODE_BLOCK = 64  # prompts encoded together, ahead of time
SWITCH_INTERVAL_S = 2e-4
REPORT_INTERVAL_S, BAR_INTERVAL_S = 5.0, 0.2  # of printed lines, and of the bar on a terminal

UNFINISHED_PROMPT = "varied prompt did not end"


def response_seed(seed: int, prompt_id: str, sample: int, turn: int) -> int:
    key = f"{seed}/{sample}/{turn}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % 2**SEED_BITS


@dataclass
class PendingConversation(ResponseRow):
    """A row that is being generated."""

    prompt: Prompt = field(kw_only=True)
    turn: int = 0
    prompt_ids: list[int] = field(default_factory=list)  # of the current turn
    rejected: str | None = None  # why it cannot be rendered
    lead_ids: list[int] | None = None  # --lead: first tokens of the current response, once sampled
    is_sampling_lead: bool = False
    varied_start: str | None = None  # --vary: start of the prompt while the target writes its rest
    end_of_prompt: int = 0  # the token that ends a varied prompt
    is_varied: bool = False

    @classmethod
    def start(cls, prompt: Prompt, sample: int) -> Self:
        messages = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
        messages.append({"role": "user", "content": prompt.turns[0]})
        return cls(prompt.id, prompt.source, sample, messages, prompt=prompt)

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.sample

    @property
    def has_next_turn(self) -> bool:
        return self.turn + 1 < len(self.prompt.turns)


class ResponseWriter:
    def __init__(
        self,
        prompts: PromptSet,
        settings: ResponseSettings,
        chat: ChatFormat,
        file: ResponseFile,
        show_progress: bool = True,
    ) -> None:
        self.prompts, self.settings, self.chat, self.file = prompts, settings, chat, file
        self.selected = prompts.rows[: settings.limit]
        self.num_requested = len(self.selected) * settings.samples
        ids = {prompt.id for prompt in self.selected}
        self.num_written = sum(1 for key in file.done if key[0] in ids and key[1] < settings.samples)
        self.num_before, self.num_kept, self.num_failed, self.num_tokens = self.num_written, 0, 0, 0
        self.show_progress, self.started = show_progress, time.monotonic()
        self._last_report = self.started
        self._pending: dict[int, PendingConversation] = {}
        self._next_request_id = 0

    def run(self, load_generator: Callable[[], ResponseGenerator]) -> DataSummary:
        """Runs until every row is written, or Ctrl-C. The next run generates unfinished rows again."""
        interrupted = False
        try:
            if self.num_written < self.num_requested:
                self.generator = load_generator()
                self.max_model_len = self.generator.max_model_len or sys.maxsize
                self._generate()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self.file.close()
        return self._summarize(interrupted)

    def _generate(self) -> None:
        # Encoding and writing threads must release the GIL soon: the engine's thread waits for it while the GPU idles.
        switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with ProgressBar(self.show_progress) as bar, ThreadPoolExecutor(1) as executor:
            new = self._encode_ahead(executor)
            ready: deque[PendingConversation] = deque()  # between two turns
            try:
                while True:
                    while self.generator.num_free_slots > 0 and (row := ready.popleft() if ready else next(new, None)):
                        self._submit(row)
                    if not self._pending:
                        break
                    ready += self._process(self.generator.poll())
                    self._report_progress(bar)
            finally:
                new.close()
                self.generator.close()
                sys.setswitchinterval(switch_interval)

    def _encode_ahead(self, executor: ThreadPoolExecutor) -> Generator[PendingConversation, None, None]:
        """The rows to generate; the next block is encoded while the current one is used."""
        todo = (
            PendingConversation.start(prompt, sample)
            for prompt in self.selected
            for sample in range(self.settings.samples)
            if (prompt.id, sample) not in self.file.done
        )

        def encode_block() -> list[PendingConversation]:
            block = list(islice(todo, ENCODE_BLOCK))
            self._encode(block)
            return block

        future = executor.submit(encode_block)
        while block := future.result():
            future = executor.submit(encode_block)
            yield from block

    def _encode(self, rows: list[PendingConversation]) -> None:
        """Sets the prompt ids of the next turn, or of a varied prompt's start; marks rows that cannot be rendered."""
        try:
            if self.settings.vary:
                self._start_varied_prompts([row for row in rows if row.sample and not row.is_varied])
            turns = [row for row in rows if row.varied_start is None]
            encoded = self.chat.encode_conversations([row.messages for row in turns], add_generation_prompt=True)
            for row, ids in zip(turns, encoded, strict=True):
                row.prompt_ids = ids
        except UserError as error:
            if len(rows) == 1:
                rows[0].rejected = str(error)
            else:
                for row in rows:
                    self._encode([row])

    def _submit(self, row: PendingConversation) -> None:
        if row.rejected is not None:
            self._drop(row, self.chat.rejection, row.rejected)
            return
        ids, params = self._next_request(row)
        if len(ids) >= self.max_model_len:
            self._drop(row, "prompt too long", f"{len(ids)} tokens")
            return
        self.generator.submit(GenerationRequest(self._next_request_id, row.messages, ids, params))
        self._pending[self._next_request_id] = row
        self._next_request_id += 1

    def _next_request(self, row: PendingConversation) -> tuple[list[int], SamplingParams]:
        """Token ids to continue and sampling parameters: of a varied prompt, a response's first tokens, or its rest."""
        if row.varied_start is not None:
            return row.prompt_ids, self.settings.vary_params(self._prompt_seed(row), row.end_of_prompt)
        seed, lead_ids = response_seed(self.settings.seed, *row.key, row.turn), row.lead_ids or []
        lead_params = self.settings.lead_params(row.sample, seed) if row.lead_ids is None else None
        row.is_sampling_lead = lead_params is not None
        return row.prompt_ids + lead_ids, lead_params or self.settings.params(seed, len(lead_ids))

    def _process(self, results: list[GenerationResult]) -> list[PendingConversation]:
        """Writes complete rows; returns those with another request."""
        next_turns, with_lead = [], []
        for result in results:
            row = self._pending.pop(result.request_id)
            if result.error is not None:
                self.num_failed += 1
                continue
            if result.rejected is not None:
                self._drop(row, result.rejected, result.detail)
                continue
            try:
                ids = result.token_ids if result.token_ids is not None else self._encode_response(row, result)
            except UserError as error:
                self._drop(row, "template does not round-trip", str(error))
                continue
            if row.varied_start is not None:
                if self._finish_varied_prompt(row, ids, result):
                    next_turns.append(row)
                else:
                    self._drop(row, UNFINISHED_PROMPT, num_tokens=len(ids))
                continue
            is_full = len(row.prompt_ids) + len(ids) >= self.max_model_len
            if row.is_sampling_lead and result.finish_reason != "stop" and not is_full:
                row.lead_ids = ids
                with_lead.append(row)
                continue
            ids, row.lead_ids = (row.lead_ids or []) + ids, None
            if result.finish_reason == LOOP or generators.is_looping(ids, result.finish_reason == "stop"):
                self._finish_looping(row, ids, result)
                continue
            self._append_response(row, ids, result)
            if row.has_next_turn:
                row.turn += 1
                row.messages.append({"role": "user", "content": row.prompt.turns[row.turn]})
                self.num_tokens += len(ids)
                next_turns.append(row)
            else:
                self._write(row, len(ids))
        self._encode(next_turns)
        return with_lead + next_turns

    # --vary: the target writes prompts that start like the given ones

    def _start_varied_prompts(self, rows: list[PendingConversation]) -> None:
        """Keeps the first tokens of each prompt: as many as follow from the seed, at most half of them."""
        texts = []
        for row, words in zip(rows, self.chat.encode([row.prompt.turns[0] for row in rows]), strict=True):
            num_kept = min(1 + self._prompt_seed(row) % self.settings.vary, max(len(words) // 2, 1))
            before, row.end_of_prompt = self.chat.user_turn(row.prompt.system)
            row.varied_start = self.chat.decode(words[:num_kept]).rstrip("\ufffd")  # the cut may split a character
            texts.append(before + row.varied_start)
        for row, ids in zip(rows, self.chat.encode(texts), strict=True):
            row.prompt_ids = ids

    def _prompt_seed(self, row: PendingConversation) -> int:
        return response_seed(self.settings.seed, *row.key, -1)

    def _finish_varied_prompt(self, row: PendingConversation, ids: list[int], result: GenerationResult) -> bool:
        """Replaces the prompt; False if the target did not end it."""
        text = (row.varied_start or "") + self.chat.decode_responses([ids[:-1]])[0]
        row.varied_start, row.is_varied = None, True
        if result.finish_reason != "stop" or not text.strip():
            return False
        row.prompt = replace(row.prompt, turns=(text,))
        row.messages[-1] = {"role": "user", "content": text}
        return True

    # Responses

    def _finish_looping(self, row: PendingConversation, ids: list[int], result: GenerationResult) -> None:
        """Cuts the response `loop_tokens` behind the start of its loop; drops it if that leaves too little."""
        num_kept = min(generators.num_tokens_before_loop(ids) + self.settings.loop_tokens, len(ids))
        if num_kept < config.MIN_TOKENS_BEFORE_LOOP:
            self._drop(row, LOOP, num_tokens=len(ids))
            return
        self._append_response(row, ids[:num_kept], replace(result, finish_reason=LOOP, text=None))
        self._write(row, len(ids))

    def _append_response(self, row: PendingConversation, ids: list[int], result: GenerationResult) -> None:
        prompt_ids, before = row.prompt_ids, row.token_ids
        if row.spans and prompt_ids[: len(before)] != before:
            try:
                row.spans = self.chat.find_spans(row.messages, prompt_ids)
            except UserError:  # the template changes earlier responses
                row.spans = []
        row.token_ids = prompt_ids + ids
        row.spans.append((len(prompt_ids), len(row.token_ids)))
        row.finish_reason = result.finish_reason
        text_ids = ids[:-1] if result.finish_reason == "stop" else ids
        text = result.text
        if text is None and row.has_next_turn and result.finish_reason != LOOP:
            text = self.chat.decode_responses([text_ids])[0]
        # no later turn needs the last response's text, so the writing thread decodes it
        row.undecoded = text_ids if text is None else None
        row.messages.append({"role": "assistant", "content": text or ""})

    def _encode_response(self, row: PendingConversation, result: GenerationResult) -> list[int]:
        """The token ids of a response given as text: what the template adds for it."""
        assert result.text is not None
        ids, spans = self.chat.encode_with_spans([*row.messages, {"role": "assistant", "content": result.text}])
        if not spans or spans[-1][0] != len(row.prompt_ids) or ids[: spans[-1][0]] != row.prompt_ids:
            raise UserError(f"{result.text!r:.80} is not found after its prompt")
        response_ids = ids[slice(*spans[-1])]
        is_cut = result.finish_reason == "length" and response_ids[-1] in self.chat.eos_ids
        return response_ids[:-1] if is_cut else response_ids

    def _drop(self, row: PendingConversation, reason: str, detail: str = "", num_tokens: int = 0) -> None:
        """Keeps the earlier turns of a conversation, if it has any."""
        if row.spans:
            self._write(row, num_tokens)
            return
        dropped = {"id": row.id, "sample": row.sample, "reason": reason}
        self.file.put({**dropped, "detail": detail} if detail else dropped)
        self.num_written += 1
        self.num_tokens += num_tokens

    def _write(self, row: PendingConversation, num_tokens: int) -> None:
        if row.messages[-1]["role"] == "user":  # a last user turn without a response
            row.messages.pop()
        self.file.put(row)
        self.num_kept += 1
        self.num_written += 1
        self.num_tokens += num_tokens

    def _report_progress(self, bar: ProgressBar) -> None:
        now = time.monotonic()
        if not self.show_progress or now < self._last_report + (BAR_INTERVAL_S if bar.is_shown else REPORT_INTERVAL_S):
            return
        self._last_report = now
        seconds, num_new = now - self.started, self.num_written - self.num_before
        left = timedelta(seconds=int((self.num_requested - self.num_written) * seconds / max(num_new, 1)))
        status = f"{self.num_tokens / seconds:,.0f} tokens/s, {num_new - self.num_kept:,} dropped, {left} left"
        if bar.is_shown:
            bar.update(f"rows, {status}", self.num_written, self.num_requested)
        else:
            print(f"{self.num_written:,} of {self.num_requested:,} rows, {status}", file=sys.stderr, flush=True)

    def _summarize(self, interrupted: bool) -> DataSummary:
        file, prompts, seconds = self.file, self.prompts, time.monotonic() - self.started
        return DataSummary(
            out=str(file.out),
            num_rows=file.num_rows,
            num_requested=self.num_requested,
            num_tokens=file.num_tokens,
            finished_share=file.num_finished / max(file.num_rows, 1),
            num_cut=file.num_cut,
            dropped=dict(file.dropped.most_common()),
            rejected=prompts.rejection_reasons,
            num_duplicates=prompts.num_duplicates,
            num_excluded=prompts.num_excluded,
            num_new=self.num_kept,
            num_failed=self.num_failed,
            num_generated_tokens=self.num_tokens,
            seconds=seconds,
            tokens_per_second=round(self.num_tokens / seconds, 1),
            interrupted=interrupted,
            complete=file.num_rows + sum(file.dropped.values()) >= self.num_requested,
        )


def write_responses(
    prompts: str,
    out: Path,
    target: str,
    settings: ResponseSettings,
    engine: ResponseEngineSettings | None = None,
    endpoint: EndpointSettings | None = None,
    chat_template: Path | None = None,
    split: str = "train",
    show_progress: bool = True,
    raw: bool = False,
    exclude_ids: Path | None = None,
) -> DataSummary:
    """Writes the target's responses to all prompts as rows of `out`; rows of earlier runs are kept."""
    prompt_set = read_prompts(prompts, split)
    if exclude_ids is not None:
        prompt_set = prompt_set.exclude(read_excluded_ids(exclude_ids))
    folder = resolve_target(target)
    chat = load_chat_format(folder, chat_template, raw)
    _check_options(settings, endpoint, chat, raw)
    server = EndpointGenerator(endpoint) if endpoint is not None else None
    if server is None:
        read_target_config(folder)
    engine = engine or ResponseEngineSettings()
    options = {f"--{n.replace('_', '-')}": value for n, value in vars(settings).items()}
    shared = {  # by all runs of a file
        "target": target_fingerprint(folder),
        "chat template": hashlib.sha256(chat.template.encode()).hexdigest()[:16],
        "prompts": prompt_set.fingerprint,
        "writer": f"server with {server.model}" if server is not None else "engine",
        **{name: value for name, value in options.items() if name not in ("--samples", "--limit")},
        "--max-model-len": engine.max_model_len,
    }
    run = {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": installed_versions("tokenizers"),
        "target": target,
        "endpoint": endpoint.url if endpoint is not None else None,
        "settings": vars(settings),
        "prompts": {"from": prompts, "rows": len(prompt_set.rows), "rejected": len(prompt_set.rejected)},
    }
    file = ResponseFile(out, run, shared, chat.decode_responses)
    if prompt_set.rejected:
        lines = [json.dumps(vars(rejected), ensure_ascii=False) + "\n" for rejected in prompt_set.rejected]
        replace_text(sidecar_path(out, "rejected"), "".join(lines))
    writer = ResponseWriter(prompt_set, settings, chat, file, show_progress)
    try:
        summary = writer.run(lambda: server or generators.load_engine_generator(folder, engine))
    finally:
        del writer
        generators.release_engine_memory()
    if not summary.num_rows and not summary.interrupted:
        reasons = ", ".join(f"{count} {reason}" for reason, count in summary.dropped.items())
        reasons = reasons or f"{summary.num_failed} failed"
        raise UserError(f"{prompts}: no response was kept ({reasons}); see {out}.dropped")
    return summary


def _check_options(settings: ResponseSettings, endpoint: EndpointSettings | None, chat: ChatFormat, raw: bool) -> None:
    if endpoint is not None and (raw or settings.lead or settings.vary):
        flag = "--raw" if raw else f"--lead {settings.lead}" if settings.lead else f"--vary {settings.vary}"
        raise UserError(f"{flag}: needs the embedded engine; remove --endpoint {endpoint.url}")
    if settings.vary and raw:
        raise UserError(f"--vary {settings.vary}: needs a chat template that ends a user turn; remove --raw")
    if settings.vary:
        chat.user_turn(None)
