"""Conversations: the turns of a row are asked one after another, each with the answers to those before it.

Knows chat templates and nothing about engines: whoever asks gives a function that answers many prompts at once. What is
asked with which seed follows from (seed, row, turn) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peagle.config import EvalSettings, SamplingParams
from peagle.data.chat_format import ChatFormat
from peagle.data.loops import is_looping
from peagle.data.prompts import Prompt
from peagle.data.responses import response_seed
from peagle.errors import UserError
from peagle.eval.samples import Round, Sample, sample_of


@dataclass(frozen=True)
class Asked:
    row: Prompt
    turn: int
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Said:
    """`token_ids` end with the EOS token if the target said it and it is known."""

    token_ids: list[int]
    finish_reason: str  # stop or length
    rounds: tuple[Round, ...] = ()  # where whoever answered knows them
    count: int | None = None  # of tokens, where these are made of text and may be others than were said

    @property
    def tokens(self) -> int:
        return self.count if self.count is not None else len(self.token_ids)


@dataclass(frozen=True)
class Answer:
    asked: Asked
    said: Said

    @property
    def loops(self) -> bool:
        return is_looping(self.said.token_ids, self.said.finish_reason == "stop")

    def sample(self, rounds: Sequence[Round], k: int) -> Sample:
        return sample_of(self.asked.row.category, self.said.tokens, self.loops, rounds, k)


Ask = Callable[[list[Asked]], list[Said]]


class Speaker:
    """Turns rows into prompts of token ids; `longest` is what prompt and answer may have together."""

    def __init__(
        self, chat: ChatFormat | None, encode: Callable[[str], list[int]], longest: int, settings: EvalSettings
    ):
        """Without a `chat` rows are asked as they are, and may have one turn only."""
        self.chat, self.encode, self.longest, self.settings = chat, encode, longest, settings

    def converse(self, rows: Sequence[Prompt], temperature: float, ask: Ask) -> tuple[list[Answer], list[str]]:
        """All turns of all rows, and what was left out. Answers come in the order of rows, then turns."""
        said: list[list[dict[str, str]]] = [
            [{"role": "system", "content": row.system}] if row.system is not None else [] for row in rows
        ]
        answers: list[list[Answer]] = [[] for _ in rows]
        left_out: list[str] = []
        going = list(range(len(rows)))
        for turn in range(max((len(row.turns) for row in rows), default=0)):
            going = [i for i in going if len(rows[i].turns) > turn]
            for i in going:
                said[i].append({"role": "user", "content": rows[i].turns[turn]})
            prompts = self._encoded([rows[i] for i in going], [said[i] for i in going])
            asked = {}
            for i, ids in zip(list(going), prompts, strict=True):
                if len(ids) >= self.longest:
                    left_out.append(
                        f"row {rows[i].id}, turn {turn + 1}: {len(ids)} tokens, the context has {self.longest}"
                    )
                    going.remove(i)
                    continue
                asked[i] = Asked(rows[i], turn, ids, self._params(rows[i], turn, temperature))
            for i, got in zip(asked, ask(list(asked.values())), strict=True):
                answers[i].append(Answer(asked[i], got))
                said[i].append({"role": "assistant", "content": self._text(got)})
        return [answer for each in answers for answer in each], left_out

    def _params(self, row: Prompt, turn: int, temperature: float) -> SamplingParams:
        seed = response_seed(self.settings.seed, row.id, 0, turn)
        return SamplingParams(max_tokens=self.settings.max_tokens, temperature=temperature, seed=seed)

    def _encoded(self, rows: Sequence[Prompt], talks: Sequence[list[dict[str, str]]]) -> list[list[int]]:
        if self.chat is not None:
            return self.chat.encode_conversations(talks, add_generation_prompt=True)
        long = next((row for row in rows if len(row.turns) > 1 or row.system is not None), None)
        if long is not None:
            raise UserError(f"--raw: row {long.id} has several turns or a system message, which needs a chat template")
        return [self.encode(row.turns[0]) for row in rows]

    def _text(self, said: Said) -> str:
        if self.chat is None:
            return ""
        ended = said.finish_reason == "stop" and said.token_ids and said.token_ids[-1] in self.chat.eos_ids
        return self.chat.decode_responses([said.token_ids[:-1] if ended else said.token_ids])[0]
