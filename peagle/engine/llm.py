"""`LLM`: prompts in, text out. `step()` is the whole engine: plan, verify and draft, commit.

Knows nothing about tensors; text enters and leaves here and nowhere else.
"""

from __future__ import annotations

import gc
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from peagle.checkpoints.target import Target, has_tokenizer, load_tokenizer
from peagle.config import EngineSettings, Grammar, SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.engine.grammar import Grammars
from peagle.engine.kv_cache import BlockPool
from peagle.engine.loader import load
from peagle.engine.model_runner import PendingStep
from peagle.engine.request import (
    CompletionOutput,
    Request,
    RequestGroup,
    RequestOutput,
    RequestState,
    StreamDelta,
)
from peagle.engine.scheduler import Scheduler
from peagle.errors import UserError
from peagle.models.drafter import Drafter
from peagle.speculative.adaptive_k import AdaptiveK
from peagle.speculative.reference import check_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


class LLM:
    """A target, maybe with a drafter, ready to answer.

        llm = LLM("smollm2-135m", drafter="smollm2-135m-p-eagle")
        print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}])[0].outputs[0].text)

    `num_speculative_tokens` is how many drafts a round has; "auto" lets it follow the load. The text is the same
    whatever it is. A target or drafter that is loaded already is taken as it is. See `EngineSettings` for the
    other options.
    """

    def __init__(
        self,
        target: str | Path | Target,
        drafter: str | Path | Drafter | None = None,
        num_speculative_tokens: int | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        self.settings = EngineSettings(num_speculative_tokens=num_speculative_tokens, **options)
        loaded = load(target, drafter, self.settings)
        self.target, self.drafter, self.model_runner = loaded.target, loaded.drafter, loaded.runner
        self.max_model_len = loaded.longest
        self.adaptive_k = AdaptiveK(loaded.choices, loaded.costs)
        pool = BlockPool(
            loaded.num_blocks,
            prefix_caching=self.settings.enable_prefix_caching,
            lookahead=1 if loaded.drafter is not None else 0,
        )
        self.scheduler = Scheduler(
            pool,
            loaded.max_num_seqs,
            loaded.choices[-1],
            self.adaptive_k.choose_k,
            loaded.chunk_tokens,
            loaded.idle_chunk_tokens,
            loaded.choices if loaded.runner.decode_graphs is not None else None,
        )
        self.lookahead = loaded.lookahead
        self._in_flight: deque[PendingStep] = deque()
        self._returned = 0.0  # when the last one came back
        self._next_id = 0
        self.acceptance_histogram = [0] * (loaded.choices[-1] + 1)  # rounds with drafts, by how many of them held
        self.num_draft_tokens = 0
        self._shaped = 0  # requests alive whose logits are shaped on the host's word
        self.has_tokenizer = self.settings.tokenizer and has_tokenizer(self.target.folder)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._grammars: Grammars | None = None
        self._grammars_made = threading.Lock()
        gc.freeze()  # what is loaded by now stays: no collection needs to look at it again

    def memory_bytes(self) -> dict[str, int]:
        """Bytes, by what they are for."""
        parameters = {id(p): p.nbytes for p in self.target.model.parameters()}
        caches = [self.model_runner.cache]
        if self.drafter is not None:
            parameters |= {id(p): p.nbytes for p in self.drafter.parameters()}
            caches.append(self.model_runner.draft_cache)
        return {
            "weights": sum(parameters.values()),
            "cache": sum(cache.nbytes for cache in caches),
            "graphs": self.model_runner.decode_graphs.memory if self.model_runner.decode_graphs is not None else 0,
        }

    @property
    def dtype(self) -> str:
        """What it computes in."""
        return str(self.target.model.embed_tokens.weight.dtype).removeprefix("torch.")

    # The engine

    def step(self) -> list[Request]:
        """One step of everything; the requests that gained tokens or ended.

        What is planned here runs while the tokens of the step before it come back and are committed. A request
        that shapes its logits by what it has said needs its tokens first, so then nothing is planned ahead.
        """
        if self._shaped and self._in_flight:
            return self._commit(self._in_flight.popleft())
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append(self.model_runner.launch(plan, self.scheduler.moved))
            self.scheduler.launched(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > self.lookahead):
            return self._commit(self._in_flight.popleft())
        return []

    def _commit(self, launched: PendingStep) -> list[Request]:
        """Appends what came back. Drafts are counted before the text is cut, as vLLM counts them."""
        touched, plan = [], launched.plan
        rounds, firsts = launched.wait()
        now = time.perf_counter()
        if rounds and not plan.prefill_chunks and not self._shaped:
            self.adaptive_k.observe_step_time(
                len(rounds), plan.num_draft_tokens, now - max(launched.began, self._returned)
            )
        self._returned = now
        finished, drafting = RequestState.FINISHED, self.drafter is not None
        for request, row in zip(plan.decode_requests, rounds, strict=True):
            if request.state is finished:
                continue  # it ended while this was in flight
            touched.append(request)
            request.num_decode_steps += 1
            token, accepted = row[0], row[-2]
            if drafting:
                request.num_accepted_tokens_per_step.append(accepted)
                self._count(request, row[-1], accepted)
            if (
                accepted == 0
                and request.only_tokens
                and token not in request.stop_token_ids
                and request.num_tokens + 1 < request.max_total_tokens
            ):
                request.output_token_ids.append(token)  # as `_append` would: with thousands of requests its calls count
                request.num_tokens += 1
            else:
                self._append(request, row[: accepted + 1], launched.logprobs)
            self.scheduler.returned(request, plan.num_draft_tokens + 1)
        for request, token in zip(launched.firsts, firsts, strict=True):
            if request.state is not finished:
                touched.append(request)
                self._append(request, [token], launched.logprobs)
                self.scheduler.returned(request, 1)
        for request in touched:
            if request.finish_reason is not None:
                self._retire(request)
        return touched

    def _count(self, request: Request, drafts: int, accepted: int) -> None:
        if drafts:
            request.num_drafts += 1
            self.acceptance_histogram[accepted] += 1
            self.num_draft_tokens += drafts
            for i in range(accepted):
                request.num_accepted_tokens_per_pos[i] += 1
            self.adaptive_k.observe_acceptance(drafts, accepted)

    @staticmethod
    def _append(request: Request, tokens: list[int], logprobs: dict[int, list[dict[int, float]]]) -> None:
        """Adds tokens up to the first that ends the text."""
        output, stops, text, grammar = (
            request.output_token_ids,
            request.stop_token_ids,
            request.detokenizer,
            request.matcher,
        )
        before = len(output)
        for token in tokens:
            if grammar is not None and not grammar.take(token):
                request.finish_reason, request.stop_reason = "error", f"grammar: {grammar.trouble}"
                break
            output.append(token)
            if token in stops:
                request.finish_reason = "stop"
                request.stop_reason = None if token in request.eos_ids else token
            elif text is not None and text.feed(token):
                request.finish_reason, request.stop_reason = "stop", text.stopped
            elif grammar is not None and grammar.complete:
                request.finish_reason = "stop"
            elif len(output) >= request.max_output_tokens:
                request.finish_reason = "length"
            else:
                continue
            break
        gained = len(output) - before
        request.num_tokens += gained
        if logprobs and request.id in logprobs:
            request.logprobs += logprobs[request.id][:gained]

    def _retire(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._shaped -= request.needs_logits_processing
        if request.detokenizer is not None and request.detokenizer.stopped is None:
            request.detokenizer.finish()
        elif self.has_tokenizer and request.detokenizer is None:
            said = request.output_token_ids
            ended = request.finish_reason == "stop" and said[-1] in request.stop_token_ids
            request.final_text = self._decoder(request.params)(said[: len(said) - ended])

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, stream: bool = False) -> RequestGroup:
        """Queues a prompt; its n requests are worked on by `step`. Text grows with the tokens only if `stream`
        or a stop string asks for it, and is decoded once at the end otherwise."""
        params = params or SamplingParams()
        prompt_ids = self._encode(prompt)
        check_prompt(prompt_ids, self.target.model.cfg.vocab_size, self.max_model_len)
        params.check_ids(self.target.model.cfg.vocab_size, self.target.eos_ids)
        if params.stop and not self.has_tokenizer:
            raise UserError(f"--stop: {self.target.folder} has no tokenizer, so there is no text to stop in")
        grammars = self.compile_grammar(params.grammar) if params.grammar is not None else None
        group = RequestGroup(prompt if isinstance(prompt, str) else None, prompt_ids)
        first_seed = params.seed if params.seed is not None else secrets.randbits(62)
        ends = frozenset(params.stop_token_ids)
        growing = self.has_tokenizer and (stream or bool(params.stop))
        for index in range(params.n):
            request = Request(
                id=self._next_id,
                prompt_token_ids=prompt_ids,
                params=params,
                seed=(first_seed + index) % 2**63,
                stop_token_ids=ends if params.ignore_eos else ends | self.target.eos_ids,
                # a tokenizer's EOS may lie beyond what the target can say
                all_stop_token_ids=frozenset(
                    t for t in ends | self.target.eos_ids if t < self.target.model.cfg.vocab_size
                ),
                eos_ids=frozenset() if params.ignore_eos else self.target.eos_ids,
                max_model_len=self.max_model_len,
                detokenizer=Detokenizer(self._decoder(params), params.stop, params.min_tokens) if growing else None,
                matcher=grammars.matcher(params.grammar, params.ignore_eos) if grammars and params.grammar else None,
                group=group,
                index=index,
                num_accepted_tokens_per_pos=[0] * self.scheduler.max_speculative_tokens,
            )
            self._next_id += 1
            self._shaped += request.needs_logits_processing
            group.requests.append(request)
            self.scheduler.add(request)
        return group

    def compile_grammar(self, grammar: Grammar) -> Grammars:
        """Makes a grammar ready for this target, so that `add` will not have to. Any thread may do it: a large one
        takes a second, in which nobody else need wait."""
        if not self.has_tokenizer:
            raise UserError(f"grammar: {self.target.folder} has no tokenizer, so there is no text to match")
        if self.model_runner.rates_K is not None:
            raise UserError("grammar: with synthetic acceptance drafts are kept that it would not allow")
        with self._grammars_made:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.target.model.cfg.vocab_size, self.target.eos_ids)
        self._grammars.compile(grammar)
        return self._grammars

    def abort_group(self, group: RequestGroup) -> None:
        """Ends a prompt's requests where they are; what they hold is free at once."""
        for request in group.requests:
            if request.finish_reason is None:
                request.finish_reason = "abort"
                self._retire(request)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._in_flight) or not self.scheduler.idle

    def check_integrity(self) -> None:
        """Proves that no block and no slot is lost or held twice."""
        self.scheduler.check_integrity()

    # What people call

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers a prompt (text as it is, or token ids) or many of them, in their order."""
        many = _as_many(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise UserError(f"{len(many)} prompts, but {len(each)} sampling parameters: give one, or one for each")
        groups: list[RequestGroup] = []
        try:
            for prompt, own in zip(many, each, strict=True):
                groups.append(self.add_request(prompt, own))
            self._run(groups, progress)
        except BaseException:
            for group in groups:
                self.abort_group(group)
            raise
        return [self.build_output(group) for group in groups]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers a conversation, or many, in the target's chat template."""
        many = [messages] if messages and isinstance(messages[0], dict) else messages
        return self.generate([self.encode_chat(m) for m in many], params, progress)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """An answer (to a prompt or a conversation) as it comes; leaving the loop early aborts it."""
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        params = params or SamplingParams()
        if params.n != 1:
            raise UserError(f"--n {params.n}: a stream has one answer")
        prompt = self.encode_chat(prompt) if chat else prompt  # type: ignore[arg-type]
        yield from self.stream_group(self.add_request(prompt, params, stream=True))  # type: ignore[arg-type]

    def stream_group(self, group: RequestGroup) -> Iterator[StreamDelta]:
        """Works until the group's (one) answer is there, and tells what each step added to it."""
        request, sent, shown, ended = group.requests[0], 0, 0, False
        try:
            # an answer that could not go on ends without a further token
            while sent < len(request.output_token_ids) or request.finish_reason in (None, "error") and not ended:
                if sent == len(request.output_token_ids) and request.finish_reason is None:
                    self.step()
                    continue
                grown, ended = request.detokenizer, request.finish_reason is not None
                text = "" if grown is None else grown.text if ended else grown.showable
                yield StreamDelta(
                    text[shown:],
                    request.output_token_ids[sent:],
                    request.is_draft_token[sent:],
                    request.logprobs[sent:] if request.params.logprobs is not None else None,
                    request.finish_reason,
                    request.stop_reason,
                )
                sent, shown = len(request.output_token_ids), max(shown, len(text))
        finally:
            self.abort_group(group)

    def _run(self, groups: list[RequestGroup], progress: bool) -> None:
        show = _Progress(sum(len(g.requests) for g in groups)) if progress else None
        left = [r for g in groups for r in g.requests]
        try:
            while left:
                touched = self.step()
                if show is not None:
                    show.update(touched)
                if left[-1].finish_reason is not None:
                    left = [r for r in left if r.finish_reason is None]
        finally:
            if show is not None:
                show.close()

    def build_output(self, group: RequestGroup) -> RequestOutput:
        outputs = [
            CompletionOutput(
                index=r.index,
                text=r.detokenizer.text if r.detokenizer is not None else r.final_text,
                token_ids=r.output_token_ids,
                finish_reason=r.finish_reason,
                stop_reason=r.stop_reason,
                logprobs=r.logprobs if r.params.logprobs is not None else None,
                num_drafts=r.num_drafts,
                num_accepted_tokens_per_pos=r.num_accepted_tokens_per_pos,
                is_draft_token=r.is_draft_token,
                num_decode_steps=r.num_decode_steps,
            )
            for r in group.requests
        ]
        return RequestOutput(group.prompt, group.prompt_token_ids, outputs, group.finished)

    # Text

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.target.folder)
        return self._tokenizer

    def _decoder(self, params: SamplingParams) -> Callable[[list[int]], str]:
        return lambda ids: self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        return [int(token) for token in prompt]

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation in the target's chat template, ready for the answer."""
        if not self.tokenizer.chat_template:
            raise UserError("this target has no chat template: give `generate` the prompt as it is")
        encoded = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])


def _as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array of ids, or of rows of them
        prompts = prompts.tolist()
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)  # type: ignore[list-item, arg-type]


class _Progress:
    """A bar with answers done and tokens a second."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self.task = self.bar.add_task("", total=total, rate="")
        self.tokens = self.done = 0
        self.lengths: dict[int, int] = {}
        self.bar.start()

    def update(self, touched: list[Request]) -> None:
        for request in touched:
            self.tokens += len(request.output_token_ids) - self.lengths.get(request.id, 0)
            self.lengths[request.id] = len(request.output_token_ids)
            self.done += request.finish_reason is not None
        seconds = self.bar.tasks[self.task].elapsed or 1e-9
        self.bar.update(self.task, completed=self.done, rate=f"{self.tokens / seconds:,.0f} tokens/s")

    def close(self) -> None:
        self.bar.stop()
