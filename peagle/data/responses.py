"""The target's responses: each prompt's turns are asked one after another, and the conversation is a row.

Knows nothing about engines, servers or disks. `Writer.run` is the loop. What is asked with which seed follows from
(run's seed, prompt's id, sample, turn) alone, so a run that was killed and gone on with writes the rows that it would
have written anyway.

Token ids of a conversation of two turns: the chat template makes the prompt of the second turn from the whole text so
far, as a server would. Usually it begins with the ids that were there before, and then the spans stay where they are:

    turn 1   prompt [0, 5)   answer [5, 9)     ids 0..8
    turn 2   prompt [0, 14)  answer [14, 20)   ids 0..19, spans [5, 9) and [14, 20)

If the text of an answer is encoded in other tokens than the target said it in, the first answer's span is found anew.
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
from peagle.data.progress import DataSummary, GenerationProgress, percentiles
from peagle.data.prompts import Prompt, PromptSet
from peagle.data.response_file import DroppedResponse, ResponseFile, ResponseRow
from peagle.errors import UserError

SEED_BITS = 31  # more than that is not a number to every server
BLOCK_PROMPTS = 64  # encoded together, ahead of their turn
TURN = 2e-4  # seconds that a thread may keep the interpreter while another waits for it

TOO_LONG = "prompt too long"
NO_PROMPT = "no end to a varied prompt"


def response_seed(seed: int, prompt_id: str, sample: int, turn: int) -> int:
    told = f"{seed}/{sample}/{turn}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") % 2**SEED_BITS


@dataclass
class PendingConversation:
    """One row in the making."""

    prompt: Prompt
    sample: int
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0
    prompt_ids: list[int] = field(default_factory=list)  # of the turn that is asked
    token_ids: list[int] = field(default_factory=list)  # up to the last answer
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = ""
    unread: list[int] | None = None
    refused: str | None = None  # why it cannot be rendered
    lead: list[int] | None = None  # of the answer that is asked: its first tokens, once they are known
    leading: bool = False  # they are being asked for
    begun: str | None = None  # how the prompt that is being made up begins
    varied: bool = False  # it has been made up

    def __post_init__(self) -> None:
        if self.prompt.system is not None:
            self.messages.append({"role": "system", "content": self.prompt.system})
        self.messages.append({"role": "user", "content": self.prompt.turns[0]})

    @property
    def more(self) -> bool:
        return self.turn + 1 < len(self.prompt.turns)

    def row(self) -> ResponseRow:
        # a question that got no answer is no part of it
        messages = self.messages if self.messages[-1]["role"] == "assistant" else self.messages[:-1]
        return ResponseRow(
            self.prompt.id,
            self.prompt.source,
            self.sample,
            messages,
            self.token_ids,
            self.spans,
            self.finish_reason,
            self.unread,
        )


@contextmanager
def _short_turns() -> Iterator[None]:
    """Threads that encode and write hand the interpreter over soon: the engine's waits for it while the GPU is idle."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
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
        source: ResponseGenerator,
        file: ResponseFile,
        shown: bool = True,
    ) -> None:
        self.prompts, self.settings, self.chat = prompts, settings, chat
        self.source, self.file = source, file
        self.chosen = prompts.rows[: settings.limit]
        self.asked = len(self.chosen) * settings.samples
        ids = {prompt.id for prompt in self.chosen}
        before = sum(1 for key in file.done if key[0] in ids and key[1] < settings.samples)
        self.progress = GenerationProgress(self.asked, before, shown)
        self.kept = self.failed = 0
        self._open: dict[int, PendingConversation] = {}
        self._next_key = 0
        self._user_turns: dict[str | None, tuple[str, int]] = {}  # by the system message

    def run(self) -> DataSummary:
        """Until every row is written, or Ctrl-C. What is in the making then is asked again by the next run."""
        interrupted = False
        with ThreadPoolExecutor(1) as ahead, _short_turns():
            waiting = self._encoded(ahead)
            again: deque[PendingConversation] = deque()  # between two turns
            try:
                while True:
                    while self.source.num_free_slots > 0 and (one := again.popleft() if again else next(waiting, None)):
                        self._ask(one)
                    if not self._open:
                        break
                    again += self._taken(self.source.poll())
                    self.progress.show()
            except KeyboardInterrupt:
                interrupted = True
            finally:
                waiting.close()
                self.source.close()
                self.progress.close()
                self.file.close()
        return self._summary(interrupted)

    def _todo(self) -> Iterator[PendingConversation]:
        for prompt in self.chosen:
            for sample in range(self.settings.samples):
                if (prompt.id, sample) not in self.file.done:
                    yield PendingConversation(prompt, sample)

    def _encoded(self, ahead: ThreadPoolExecutor) -> Generator[PendingConversation, None, None]:
        """What is to do, with the ids of the first turn; the next block is encoded while this one is used."""
        todo = self._todo()

        def block() -> list[PendingConversation]:
            made = list(islice(todo, BLOCK_PROMPTS))
            self._encode(made)
            return made

        coming = ahead.submit(block)
        while made := coming.result():
            coming = ahead.submit(block)
            yield from made

    def _encode(self, many: list[PendingConversation]) -> None:
        """The ids of the turn that is asked next, or of a prompt's beginning; what cannot be rendered says why."""
        try:
            if self.settings.vary:
                self._begin([one for one in many if one.sample and not one.varied])
            turns = [one for one in many if one.begun is None]
            for one, ids in zip(turns, self.chat.ids([t.messages for t in turns], ready=True), strict=True):
                one.prompt_ids = ids
        except UserError as error:
            if len(many) == 1:
                many[0].refused = str(error)
            else:
                for one in many:
                    self._encode([one])

    def _ask(self, one: PendingConversation) -> None:
        longest = self.source.max_model_len
        if one.refused is not None:
            self._end(one, DroppedResponse(*self._key(one), self.chat.refusal, one.refused), 0)
            return
        ids, params = self._next(one)
        if longest is not None and len(ids) >= longest:
            self._end(one, DroppedResponse(*self._key(one), TOO_LONG, f"{len(ids)} tokens"), 0)
            return
        self.source.submit(GenerationRequest(self._next_key, one.messages, ids, params))
        self._open[self._next_key] = one
        self._next_key += 1

    def _next(self, one: PendingConversation) -> tuple[list[int], SamplingParams]:
        """What is to be gone on with, and how: a prompt's beginning, a turn, or a turn and an answer's first tokens."""
        if one.begun is not None:
            return one.prompt_ids, self.settings.vary_params(self._prompt_seed(one), self._user_turn(one)[1])
        seed, lead = response_seed(self.settings.seed, one.prompt.id, one.sample, one.turn), one.lead or []
        first = self.settings.lead_params(one.sample, seed) if one.lead is None else None
        one.leading = first is not None
        return one.prompt_ids + lead, first or self.settings.params(seed, len(lead))

    def _begin(self, many: list[PendingConversation]) -> None:
        """Prompts like those given: so many of their tokens as follow from the seed, at most half of them."""
        begun = []
        for one, words in zip(many, self.chat.encode([one.prompt.turns[0] for one in many]), strict=True):
            kept = min(1 + self._prompt_seed(one) % self.settings.vary, max(len(words) // 2, 1))
            begun.append(self.chat.decode(words[:kept]).rstrip("\ufffd"))  # a character may end in another token
        beginnings = [self._user_turn(one)[0] + text for one, text in zip(many, begun, strict=True)]
        for one, text, ids in zip(many, begun, self.chat.encode(beginnings), strict=True):
            one.begun, one.prompt_ids = text, ids

    def _prompt_seed(self, one: PendingConversation) -> int:
        return response_seed(self.settings.seed, one.prompt.id, one.sample, -1)

    def _user_turn(self, one: PendingConversation) -> tuple[str, int]:
        system = one.prompt.system
        if system not in self._user_turns:
            found = self.chat.user_turn(system)
            if found is None:  # only behind this system message, as it was asked about before
                raise UserError("the chat template puts nothing behind a user's turn")
            self._user_turns[system] = found
        return self._user_turns[system]

    def _vary(self, one: PendingConversation, ids: list[int], answer: GenerationResult) -> DroppedResponse | None:
        """Puts what was made up in the place of the prompt; a prompt that does not end is none."""
        made = (one.begun or "") + self.chat.answers([ids[:-1]])[0]
        one.begun, one.varied = None, True
        if answer.finish_reason != "stop" or not made.strip():
            return DroppedResponse(*self._key(one), NO_PROMPT)
        one.prompt = replace(one.prompt, turns=(made,))
        one.messages[-1] = {"role": "user", "content": made}
        return None

    def _taken(self, answers: list[GenerationResult]) -> list[PendingConversation]:
        """Writes what is complete; gives back what has another turn, or its first one now."""
        going_on, led = [], []
        for answer in answers:
            one = self._open.pop(answer.request_id)
            if answer.error is not None:
                self.failed += 1
                continue
            if answer.rejected is not None:
                self._end(one, DroppedResponse(*self._key(one), answer.rejected, answer.detail), 0)
                continue
            try:
                ids = answer.token_ids if answer.token_ids is not None else self._ids_of(one, answer)
            except UserError as error:
                self._end(one, DroppedResponse(*self._key(one), "template does not round-trip", str(error)), 0)
                continue
            if one.begun is not None:
                if (dropped := self._vary(one, ids, answer)) is not None:
                    self._end(one, dropped, len(ids))
                else:
                    going_on.append(one)
                continue
            if one.leading and answer.finish_reason != "stop" and not self._full(one, ids):
                one.lead = ids
                led.append(one)
                continue
            ids, one.lead = (one.lead or []) + ids, None
            if answer.finish_reason == LOOP or is_looping(ids, answer.finish_reason == "stop"):
                self._end_loop(one, ids, answer)
                continue
            self._append(one, ids, answer)
            if one.more:
                one.turn += 1
                one.messages.append({"role": "user", "content": one.prompt.turns[one.turn]})
                self.progress.tokens += len(ids)
                going_on.append(one)
            else:
                self._end(one, None, len(ids))
        self._encode(going_on)
        return led + going_on

    def _full(self, one: PendingConversation, ids: list[int]) -> bool:
        longest = self.source.max_model_len
        return longest is not None and len(one.prompt_ids) + len(ids) >= longest

    def _end_loop(self, one: PendingConversation, ids: list[int], answer: GenerationResult) -> None:
        """What comes before the loop is kept, and so much of it as is asked for, if that is enough."""
        cut = min(num_tokens_before_loop(ids) + self.settings.loop_tokens, len(ids))
        if cut < MIN_TOKENS_BEFORE_LOOP:
            self._end(one, DroppedResponse(*self._key(one), LOOP), len(ids))
            return
        self._append(one, ids[:cut], replace(answer, finish_reason=LOOP, text=None))
        self._end(one, None, len(ids))

    def _append(self, one: PendingConversation, ids: list[int], answer: GenerationResult) -> None:
        prompt_ids, before = one.prompt_ids, one.token_ids
        if one.spans and prompt_ids[: len(before)] != before:
            try:
                one.spans = self.chat.locate(one.messages, prompt_ids)
            except UserError:  # this template does not repeat earlier answers as they were
                one.spans = []
        one.token_ids = prompt_ids + ids
        one.spans.append((len(prompt_ids), len(one.token_ids)))
        one.finish_reason = answer.finish_reason
        said = ids[:-1] if answer.finish_reason == "stop" else ids
        text = answer.text
        if text is None and one.more and answer.finish_reason != LOOP:
            text = self.chat.answers([said])[0]
        # the last answer's text is nobody's question, so the writing thread makes it
        one.unread = said if text is None else None
        one.messages.append({"role": "assistant", "content": text or ""})

    def _ids_of(self, one: PendingConversation, answer: GenerationResult) -> list[int]:
        """The tokens of an answer of which only the text is known: what the template adds for it."""
        assert answer.text is not None
        messages = [*one.messages, {"role": "assistant", "content": answer.text}]
        ids, spans = self.chat.conversation(messages)
        if not spans or spans[-1][0] != len(one.prompt_ids) or ids[: spans[-1][0]] != one.prompt_ids:
            raise UserError(f"{answer.text!r:.80} is not found behind its prompt")
        said = ids[slice(*spans[-1])]
        return said[:-1] if answer.finish_reason == "length" and said[-1] in self.chat.eos_ids else said

    def _end(self, one: PendingConversation, dropped: DroppedResponse | None, tokens: int) -> None:
        """Whatever ends a later turn, the answers before it stay."""
        kept = dropped is None or bool(one.spans)
        if kept:
            self.file.put(one.row())
            self.kept += 1
        elif dropped is not None:
            self.file.put(dropped)
        self.progress.add(tokens, kept)

    @staticmethod
    def _key(one: PendingConversation) -> tuple[str, int]:
        return one.prompt.id, one.sample

    def _summary(self, interrupted: bool) -> DataSummary:
        totals = self.file.totals
        return DataSummary(
            out=str(self.file.out),
            rows=len(totals.lengths),
            asked=self.asked,
            tokens=sum(totals.lengths),
            lengths=percentiles(totals.lengths),
            ended=totals.ended / max(len(totals.lengths), 1),
            cut=totals.cut,
            dropped=dict(totals.dropped.most_common()),
            refused=self.prompts.reasons,
            duplicates=self.prompts.duplicates,
            new=self.kept,
            failed=self.failed,
            generated=self.progress.tokens,
            seconds=self.progress.seconds,
            interrupted=interrupted,
        )
