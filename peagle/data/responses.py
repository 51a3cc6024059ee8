"""Generates the target's responses: the user turns of each prompt one after another; each conversation is a row.

`ResponseWriter.run` is the loop. The seed of a response depends only on (run seed, prompt id, sample, turn), so a
resumed run writes the rows of an uninterrupted one.

Token ids of a conversation of two turns: the template renders the prompt of the second turn from the whole text, as a
server does. Usually that starts with the ids of the first turn, and the spans stay valid:

    turn 1   prompt [0, 5)   response [5, 9)     ids 0..8
    turn 2   prompt [0, 14)  response [14, 20)   ids 0..19, spans [5, 9) and [14, 20)

If the tokenizer encodes a response's text differently from the generated tokens, the earlier spans are located again.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

from peagle.config import MIN_TOKENS_BEFORE_LOOP, ResponseSettings, SamplingParams
from peagle.data.chat_format import ChatFormat
from peagle.data.generators import GenerationRequest, GenerationResult, ResponseGenerator
from peagle.data.loops import LOOP, is_looping, num_tokens_before_loop
from peagle.data.progress import DataSummary, GenerationProgress, compute_percentiles
from peagle.data.prompts import Prompt, PromptSet
from peagle.data.response_file import DroppedResponse, ResponseFile, ResponseRow
from peagle.errors import UserError

SEED_BITS = 31  # larger seeds are rejected by some servers
ENCODE_BLOCK = 64  # prompts encoded together, ahead of time
SWITCH_INTERVAL_S = 2e-4

PROMPT_TOO_LONG = "prompt too long"
UNFINISHED_PROMPT = "varied prompt did not end"


def response_seed(seed: int, prompt_id: str, sample: int, turn: int) -> int:
    key = f"{seed}/{sample}/{turn}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % 2**SEED_BITS


@dataclass
class PendingConversation:
    """A row that is being generated."""

    prompt: Prompt
    sample: int
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0
    prompt_ids: list[int] = field(default_factory=list)  # of the current turn
    token_ids: list[int] = field(default_factory=list)  # up to the last response
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = ""
    undecoded: list[int] | None = None
    rejected: str | None = None  # why it cannot be rendered
    lead_ids: list[int] | None = None  # --lead: first tokens of the current response, once sampled
    is_sampling_lead: bool = False
    varied_start: str | None = None  # --vary: start of the prompt while the target writes its rest
    is_varied: bool = False

    def __post_init__(self) -> None:
        if self.prompt.system is not None:
            self.messages.append({"role": "system", "content": self.prompt.system})
        self.messages.append({"role": "user", "content": self.prompt.turns[0]})

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt.id, self.sample

    @property
    def has_next_turn(self) -> bool:
        return self.turn + 1 < len(self.prompt.turns)

    def to_row(self) -> ResponseRow:
        # drops a last user turn without a response
        messages = self.messages if self.messages[-1]["role"] == "assistant" else self.messages[:-1]
        return ResponseRow(
            *(self.prompt.id, self.prompt.source, self.sample, messages),
            *(self.token_ids, self.spans, self.finish_reason, self.undecoded),
        )


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Makes encoding and writing threads release the GIL soon: the engine's thread waits for it while the GPU idles."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class ResponseWriter:
    def __init__(
        self,
        prompts: PromptSet,
        settings: ResponseSettings,
        chat: ChatFormat,
        generator: ResponseGenerator,
        file: ResponseFile,
        show_progress: bool = True,
    ) -> None:
        self.prompts, self.settings, self.chat = prompts, settings, chat
        self.generator, self.file = generator, file
        self.selected = prompts.rows[: settings.limit]
        self.num_requested = len(self.selected) * settings.samples
        ids = {prompt.id for prompt in self.selected}
        num_before = sum(1 for key in file.done if key[0] in ids and key[1] < settings.samples)
        self.progress = GenerationProgress(self.num_requested, num_before, show_progress)
        self.num_kept = self.num_failed = 0
        self._pending: dict[int, PendingConversation] = {}
        self._next_request_id = 0
        self._user_turns: dict[str | None, tuple[str, int]] = {}  # by system message

    def run(self) -> DataSummary:
        """Runs until every row is written, or Ctrl-C. The next run generates unfinished rows again."""
        interrupted = False
        with ThreadPoolExecutor(1) as executor, _short_switch_interval():
            new = self._encode_ahead(executor)
            ready: deque[PendingConversation] = deque()  # between two turns
            try:
                while True:
                    while self.generator.num_free_slots > 0 and (row := ready.popleft() if ready else next(new, None)):
                        self._submit(row)
                    if not self._pending:
                        break
                    ready += self._process(self.generator.poll())
                    self.progress.update()
            except KeyboardInterrupt:
                interrupted = True
            finally:
                new.close()
                self.generator.close()
                self.progress.close()
                self.file.close()
        return self._summarize(interrupted)

    def _encode_ahead(self, executor: ThreadPoolExecutor) -> Generator[PendingConversation, None, None]:
        """The rows to generate; the next block is encoded while the current one is used."""
        todo = (
            PendingConversation(prompt, sample)
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
        max_model_len = self.generator.max_model_len
        if row.rejected is not None:
            self._drop(row, self.chat.rejection, row.rejected)
            return
        ids, params = self._next_request(row)
        if max_model_len is not None and len(ids) >= max_model_len:
            self._drop(row, PROMPT_TOO_LONG, f"{len(ids)} tokens")
            return
        self.generator.submit(GenerationRequest(self._next_request_id, row.messages, ids, params))
        self._pending[self._next_request_id] = row
        self._next_request_id += 1

    def _next_request(self, row: PendingConversation) -> tuple[list[int], SamplingParams]:
        """Token ids to continue and sampling parameters: of a varied prompt, a response's first tokens, or its rest."""
        if row.varied_start is not None:
            return row.prompt_ids, self.settings.vary_params(self._prompt_seed(row), self._user_turn(row)[1])
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
            if row.is_sampling_lead and result.finish_reason != "stop" and not self._is_full(row, ids):
                row.lead_ids = ids
                with_lead.append(row)
                continue
            ids, row.lead_ids = (row.lead_ids or []) + ids, None
            if result.finish_reason == LOOP or is_looping(ids, result.finish_reason == "stop"):
                self._finish_looping(row, ids, result)
                continue
            self._append_response(row, ids, result)
            if row.has_next_turn:
                row.turn += 1
                row.messages.append({"role": "user", "content": row.prompt.turns[row.turn]})
                self.progress.tokens += len(ids)
                next_turns.append(row)
            else:
                self._write(row, len(ids))
        self._encode(next_turns)
        return with_lead + next_turns

    # --vary: the target writes prompts that start like the given ones

    def _start_varied_prompts(self, rows: list[PendingConversation]) -> None:
        """Keeps the first tokens of each prompt: as many as follow from the seed, at most half of them."""
        starts = []
        for row, words in zip(rows, self.chat.encode([row.prompt.turns[0] for row in rows]), strict=True):
            num_kept = min(1 + self._prompt_seed(row) % self.settings.vary, max(len(words) // 2, 1))
            starts.append(self.chat.decode(words[:num_kept]).rstrip("\ufffd"))  # the cut may split a character
        texts = [self._user_turn(row)[0] + start for row, start in zip(rows, starts, strict=True)]
        for row, start, ids in zip(rows, starts, self.chat.encode(texts), strict=True):
            row.varied_start, row.prompt_ids = start, ids

    def _prompt_seed(self, row: PendingConversation) -> int:
        return response_seed(self.settings.seed, *row.key, -1)

    def _user_turn(self, row: PendingConversation) -> tuple[str, int]:
        system = row.prompt.system
        if system not in self._user_turns:
            found = self.chat.user_turn(system)
            if found is None:  # only with this system message: `write_responses` has checked the template without one
                raise UserError("the chat template adds nothing after a user turn")
            self._user_turns[system] = found
        return self._user_turns[system]

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

    def _is_full(self, row: PendingConversation, ids: list[int]) -> bool:
        max_model_len = self.generator.max_model_len
        return max_model_len is not None and len(row.prompt_ids) + len(ids) >= max_model_len

    def _finish_looping(self, row: PendingConversation, ids: list[int], result: GenerationResult) -> None:
        """Cuts the response `loop_tokens` behind the start of its loop; drops it if that leaves too little."""
        num_kept = min(num_tokens_before_loop(ids) + self.settings.loop_tokens, len(ids))
        if num_kept < MIN_TOKENS_BEFORE_LOOP:
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
        self.file.put(DroppedResponse(*row.key, reason, detail))
        self.progress.add_row(num_tokens, kept=False)

    def _write(self, row: PendingConversation, num_tokens: int) -> None:
        self.file.put(row.to_row())
        self.num_kept += 1
        self.progress.add_row(num_tokens, kept=True)

    def _summarize(self, interrupted: bool) -> DataSummary:
        totals, prompts = self.file.totals, self.prompts
        return DataSummary(
            out=str(self.file.out),
            num_rows=len(totals.lengths),
            num_requested=self.num_requested,
            num_tokens=sum(totals.lengths),
            lengths=compute_percentiles(totals.lengths),
            finished_share=totals.num_finished / max(len(totals.lengths), 1),
            num_cut=totals.num_cut,
            dropped=dict(totals.dropped.most_common()),
            rejected=prompts.rejection_reasons,
            num_duplicates=prompts.num_duplicates,
            num_excluded=prompts.num_excluded,
            num_new=self.num_kept,
            num_failed=self.num_failed,
            num_generated_tokens=self.progress.tokens,
            seconds=self.progress.seconds,
            interrupted=interrupted,
        )
