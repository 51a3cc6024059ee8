"""Runs conversations: every turn is sent with the responses to the turns before it.

The engine is a function that completes a list of requests. The seed of a request depends only on (seed, row, turn).
`Evaluator` is the interface of the engines that `peagle eval` measures.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peagle.config import EvalSettings, Method, SamplingParams
from peagle.data.chat_format import ChatFormat
from peagle.data.generators import is_looping
from peagle.data.prompts import Prompt
from peagle.data.responses import response_seed
from peagle.errors import UserError
from peagle.eval.datasets import EvalDataset
from peagle.eval.samples import AcceptanceSample, DraftResult, build_sample


@dataclass(frozen=True)
class EvalRequest:
    row: Prompt
    turn: int
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class EvalResponse:
    """`token_ids` include the EOS token if the engine returns it."""

    token_ids: list[int]
    finish_reason: str  # stop or length
    num_tokens: int  # may differ from token_ids if these were encoded from text
    drafts: tuple[DraftResult, ...] = ()  # if the engine reports them

    @property
    def is_looping(self) -> bool:
        return is_looping(self.token_ids, self.finish_reason == "stop")


@dataclass(frozen=True)
class CompletedTurn:
    request: EvalRequest
    response: EvalResponse

    def build_sample(self, drafts: Sequence[DraftResult], k: int) -> AcceptanceSample:
        response = self.response
        return build_sample(self.request.row.category, response.num_tokens, response.is_looping, drafts, k)


Complete = Callable[[list[EvalRequest]], list[EvalResponse]]
EvalProgress = Callable[[str, int, int], None]  # activity, completed, total


@dataclass
class ConversationRunner:
    """Builds prompts from rows and collects the responses. Without a chat format rows must have a single turn."""

    chat_format: ChatFormat | None
    encode: Callable[[str], list[int]]
    max_model_len: int
    settings: EvalSettings
    on_progress: EvalProgress
    warnings: list[str] = field(default_factory=list)

    def run(self, rows: Sequence[Prompt], temperature: float, complete: Complete) -> list[CompletedTurn]:
        """All turns in the order of rows."""
        messages: list[list[dict[str, str]]] = [
            [{"role": "system", "content": row.system}] if row.system is not None else [] for row in rows
        ]
        completed: list[list[CompletedTurn]] = [[] for _ in rows]
        active = list(range(len(rows)))
        for turn in range(max((len(row.turns) for row in rows), default=0)):
            active = [i for i in active if len(rows[i].turns) > turn]
            for i in active:
                messages[i].append({"role": "user", "content": rows[i].turns[turn]})
            prompts = self._encode_prompts([rows[i] for i in active], [messages[i] for i in active])
            requests = {}
            for i, token_ids in zip(list(active), prompts, strict=True):
                if len(token_ids) >= self.max_model_len:
                    self.warnings.append(
                        f"{rows[i].source}: turns beyond max_model_len {self.max_model_len} were skipped"
                    )
                    active.remove(i)
                    continue
                seed = response_seed(self.settings.seed, rows[i].id, 0, turn)
                params = SamplingParams(max_tokens=self.settings.max_tokens, temperature=temperature, seed=seed)
                requests[i] = EvalRequest(rows[i], turn, token_ids, params)
            for i, response in zip(requests, complete(list(requests.values())), strict=True):
                completed[i].append(CompletedTurn(requests[i], response))
                messages[i].append({"role": "assistant", "content": self._decode(response)})
        return [turn for turns in completed for turn in turns]

    def _encode_prompts(self, rows: Sequence[Prompt], conversations: Sequence[list[dict[str, str]]]) -> list[list[int]]:
        if self.chat_format is not None:
            return self.chat_format.encode_conversations(conversations, add_generation_prompt=True)
        for row in rows:
            if len(row.turns) > 1 or row.system is not None:
                raise UserError(f"--raw: row {row.id} has several turns or a system message and needs a chat template")
        return [self.encode(row.turns[0]) for row in rows]

    def _decode(self, response: EvalResponse) -> str:
        if self.chat_format is None:
            return ""
        token_ids = response.token_ids
        if response.finish_reason == "stop" and token_ids and token_ids[-1] in self.chat_format.eos_ids:
            token_ids = token_ids[:-1]
        return self.chat_format.decode_responses([token_ids])[0]


@dataclass(frozen=True)
class EvalDrafter:
    """A drafter and its name in the results. The drafter of a server may have no local folder."""

    name: str
    method: Method
    folder: Path | None


@dataclass(frozen=True)
class EvalJob:
    drafter: EvalDrafter
    dataset: EvalDataset
    temperature: float
    ks: tuple[int, ...]


class Evaluator(ABC):
    """An engine that answers prompts and counts accepted tokens."""

    measures_all_k = False  # whether one pass serves all K
    dtype: str

    def __init__(self, runner: ConversationRunner) -> None:
        self.runner, self.settings = runner, runner.settings
        self.on_progress, self.warnings = runner.on_progress, runner.warnings

    @abstractmethod
    def measure(self, job: EvalJob) -> Iterator[tuple[int, list[AcceptanceSample]]]:
        """For every K the samples of the data set's responses."""

    def close(self) -> None:  # noqa: B027
        """Ends the engine."""
