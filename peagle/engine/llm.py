"""`LLM`: prompts in, text out. `LLM.step` is the whole engine: schedule, launch, commit."""

from __future__ import annotations

import copy
import gc
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from peagle.checkpoints.target import Target, has_tokenizer, load_tokenizer
from peagle.config import EngineSettings, Grammar, SamplingParams, check_prompt
from peagle.display import ProgressBar
from peagle.engine.detokenizer import Detokenizer
from peagle.engine.grammar import GrammarCompiler, GrammarMatcher
from peagle.engine.loader import load_engine, log_duration
from peagle.engine.model_runner import PendingStep
from peagle.engine.request import CompletionOutput, Logprobs, Request, RequestGroup, RequestOutput, RequestState
from peagle.errors import UserError
from peagle.models.drafter import Drafter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


class LLM:
    """A target, optionally with a drafter, that generates text.

        llm = LLM("smollm2-135m", drafter="smollm2-135m-p-eagle")
        print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}])[0].outputs[0].text)

    `target` and `drafter` are folders, hub ids, built-in names or loaded models. `num_speculative_tokens` is the number
    of draft tokens per step; "auto" adapts it to the load. It never changes the output. `EngineSettings` documents the
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
        self.target, self.model_runner, self.scheduler, self.adaptive_k = load_engine(target, drafter, self.settings)
        self.drafter, self.max_model_len = self.model_runner.drafter, self.model_runner.max_model_len
        # Steps that may be launched before the tokens of the last one are on the host.
        self.max_in_flight_steps = 1 if self.model_runner.device.type == "cuda" else 0
        self._in_flight: deque[PendingStep] = deque()
        self._last_return = 0.0  # time.perf_counter() at the end of the last step
        self._next_id = 0
        # Number of drafts by number of accepted tokens.
        self.acceptance_histogram = [0] * (self.scheduler.max_speculative_tokens + 1)
        self.num_draft_tokens = 0
        self._num_grammars = 0  # unfinished requests with a grammar
        self.has_tokenizer = self.settings.tokenizer and has_tokenizer(self.target.folder)
        gc.freeze()  # exclude everything loaded so far from garbage collection

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of weights, KV cache and CUDA graphs."""
        runner = self.model_runner
        models = [m for m in (self.target.model, self.drafter) if m is not None]
        weights = {id(p): p.nbytes for model in models for p in model.parameters()}
        draft_cache = runner.proposer.kv_cache.nbytes if runner.proposer is not None else 0
        return {
            "weights": sum(weights.values()),
            "cache": runner.kv_cache.nbytes + draft_cache,
            "graphs": runner.decode_graphs.memory_bytes if runner.decode_graphs is not None else 0,
        }

    @property
    def dtype(self) -> str:
        """Name of the dtype of the weights and activations."""
        return str(self.target.model.embed_tokens.weight.dtype).removeprefix("torch.")

    # The engine

    def step(self) -> list[Request]:
        """Schedules and launches one step, and commits the tokens of the oldest step in flight.

        Returns the requests that gained tokens or finished. On a GPU one step stays in flight: it runs while the tokens
        of the step before are committed. The masks of grammars need these tokens: a captured step waits for them after
        its target pass, any other step is launched after the commit.
        """
        if self._num_grammars and self._in_flight and not self.model_runner.overlaps_grammars:
            return self._commit(self._in_flight.popleft())
        scheduled, updated = self.scheduler.schedule(), []
        if scheduled is not None:
            self._in_flight.append(self.model_runner.launch(scheduled, self.scheduler.changed_requests))
            self.scheduler.mark_launched(scheduled)
        if self._in_flight and (scheduled is None or len(self._in_flight) > self.max_in_flight_steps):
            self.model_runner.send_awaited_masks(self._in_flight[0])  # only after an interrupt it is not done yet
            updated = self._commit(self._in_flight.popleft())
        if self._in_flight:
            self.model_runner.send_awaited_masks(self._in_flight[0])
        return updated

    def _commit(self, step: PendingStep) -> list[Request]:
        """Waits for a step and appends its tokens. Accepted tokens are counted before a stop cuts them, as in vLLM."""
        updated, scheduled = [], step.scheduled
        decode_rows, first_tokens, logprobs = step.wait()
        now = time.perf_counter()
        if decode_rows and not scheduled.prefill_chunks and not self._num_grammars:
            seconds = now - max(step.launched_at, self._last_return)
            self.adaptive_k.observe_step_time(len(decode_rows), scheduled.num_draft_tokens, seconds)
        self._last_return = now
        finished, has_drafter = RequestState.FINISHED, self.drafter is not None
        max_new_tokens = scheduled.num_draft_tokens + 1
        for request, row in zip(scheduled.decode_requests, decode_rows, strict=True):
            if request.state is finished:
                continue  # it finished while this step was in flight
            updated.append(request)
            request.num_decode_steps += 1
            token, num_accepted = row[0], row[-2]
            if has_drafter:
                request.num_accepted_tokens_per_step.append(num_accepted)
                self._count_draft(request, row[-1], num_accepted)
            if (
                num_accepted == 0
                and token >= 0
                and request.has_tokens_only
                and token not in request.stop_token_ids
                and request.num_tokens + 1 < request.max_total_tokens
            ):  # `_append_tokens` without the call, which costs time for thousands of requests
                request.output_token_ids.append(token)
                request.num_tokens += 1
            else:
                self._append_tokens(request, row[: num_accepted + 1], logprobs)
            self.scheduler.mark_returned(request, max_new_tokens)
        for request, token in zip(step.new_requests, first_tokens, strict=True):
            if request.state is not finished:
                updated.append(request)
                self._append_tokens(request, [token], logprobs)
                self.scheduler.mark_returned(request, 1)
        for request in updated:
            if request.finish_reason is not None:
                self._finish(request)
        return updated

    def _count_draft(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None:
        if num_draft_tokens:
            request.num_drafts += 1
            self.acceptance_histogram[num_accepted] += 1
            self.num_draft_tokens += num_draft_tokens
            for i in range(num_accepted):
                request.num_accepted_tokens_per_pos[i] += 1
            self.adaptive_k.acceptance.observe(num_draft_tokens, num_accepted)

    @staticmethod
    def _append_tokens(request: Request, token_ids: list[int], logprobs: Logprobs) -> None:
        """Appends tokens up to the first that finishes the output."""
        output, detokenizer, matcher = request.output_token_ids, request.detokenizer, request.matcher
        num_before = len(output)
        for token in token_ids:
            if token < 0:
                request.finish_reason, request.stop_reason = "error", "the target's logits are NaN or infinite"
                if request.params.allowed_token_ids is not None or request.params.bad_words_token_ids:
                    request.stop_reason = "allowed_token_ids, bad_words and the grammar together allow no token"
                break
            if matcher is not None and not matcher.accept_token(token):
                request.finish_reason, request.stop_reason = "error", f"grammar: {matcher.error}"
                break
            output.append(token)
            if token in request.stop_token_ids:
                request.finish_reason = "stop"
                is_eos = token in request.eos_ids and not request.params.ignore_eos
                request.stop_reason = None if is_eos else token
            elif detokenizer is not None and detokenizer.add_token(token):
                request.finish_reason, request.stop_reason = "stop", detokenizer.stop_reason
            elif matcher is not None and matcher.is_complete:
                request.finish_reason = "stop"
            elif len(output) >= request.max_output_tokens:
                request.finish_reason = "length"
            else:
                continue
            break
        num_new = len(output) - num_before
        request.num_tokens += num_new
        if logprobs and request.id in logprobs:
            request.logprobs += logprobs[request.id][:num_new]

    def _finish(self, request: Request) -> None:
        """Releases what a request holds and completes its text."""
        self.scheduler.finish_request(request)
        self._num_grammars -= request.matcher is not None
        if request.detokenizer is not None:
            if request.detokenizer.stop_reason is None:
                request.detokenizer.finish()
        elif self.has_tokenizer and request.params.detokenize:
            output = request.output_token_ids
            ends_with_stop = request.finish_reason == "stop" and output[-1] in request.stop_token_ids
            request.final_text = self._decoder(request.params)(output[: len(output) - ends_with_stop])

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, stream: bool = False) -> RequestGroup:
        """Queues the n requests of a prompt, which `step` works on.

        Text is decoded token by token if `stream` or stop strings require it, else once at the end.
        """
        params = params or SamplingParams()
        vocab_size = self.target.model.cfg.vocab_size
        prompt_token_ids = self._encode(prompt)
        check_prompt(prompt_token_ids, vocab_size, self.max_model_len)
        if params.bad_words and not self.has_tokenizer:
            raise UserError(f"--bad-words: need a tokenizer, and {self.target.folder} has none")
        if params.bad_words:
            params = params.tokenize_bad_words(partial(self.tokenizer.encode, add_special_tokens=False))
        params.check_ids(vocab_size, self.target.eos_ids)
        if params.logprobs is not None and params.logprobs > vocab_size:
            params = replace(params, logprobs=vocab_size)
        if params.stop and not self.has_tokenizer:
            raise UserError(f"--stop: stop strings need a tokenizer, and {self.target.folder} has none")
        compiler = self.compile_grammar(params.grammar) if params.grammar is not None else None
        group = RequestGroup(prompt if isinstance(prompt, str) else None, prompt_token_ids)
        first_seed = params.seed if params.seed is not None else secrets.randbits(62)
        needs_detokenizer = self.has_tokenizer and params.detokenize and (stream or bool(params.stop))
        for index in range(params.n):
            detokenizer, matcher = None, None
            if needs_detokenizer:
                detokenizer = Detokenizer(self._decoder(params), params.stop, params.min_tokens)
            if compiler is not None and params.grammar is not None:
                matcher = GrammarMatcher(compiler, params.grammar, params.ignore_eos)
            request = Request(
                self._next_id,
                prompt_token_ids,
                params,
                seed=(first_seed + index) % 2**63,
                eos_ids=self.target.eos_ids,
                max_model_len=self.max_model_len,
                detokenizer=detokenizer,
                matcher=matcher,
                group=group,
                index=index,
                num_accepted_tokens_per_pos=[0] * self.scheduler.max_speculative_tokens,
            )
            self._next_id += 1
            self._num_grammars += matcher is not None
            group.requests.append(request)
            self.scheduler.add_request(request)
        return group

    def compile_grammar(self, grammar: Grammar) -> GrammarCompiler:
        """Compiles a grammar ahead of `add_request`. Any thread may call it: a large grammar takes about a second,
        during which the engine keeps running."""
        if not self.has_tokenizer:
            raise UserError(f"grammar: needs a tokenizer, and {self.target.folder} has none")
        if self.model_runner.sampler.synthetic_rates_K is not None:
            raise UserError("grammar: not supported with synthetic acceptance, which accepts forbidden tokens")
        self._grammar_compiler.compile(grammar)
        return self._grammar_compiler

    @cached_property
    def _grammar_compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.target.model.cfg.vocab_size, self.target.eos_ids)

    def abort_group(self, group: RequestGroup, index: int | None = None) -> None:
        """Finishes the requests of a prompt, or one of them, with reason "abort"; releases their slots and blocks."""
        for request in group.requests if index is None else [group.requests[index]]:
            if request.finish_reason is None:
                request.finish_reason = "abort"
                self._finish(request)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._in_flight) or not self.scheduler.is_idle

    def warm_up(self) -> None:
        """Compiles everything that a request may need, so that none waits for it later.

        Leaves no trace: the counts and the estimates of "auto" are as before.
        """
        adaptive_k = copy.deepcopy(vars(self.adaptive_k))
        with log_duration("compiled kernels"):
            self.model_runner.warm_up(self.scheduler.max_prefill_tokens)
        every_option = SamplingParams(
            temperature=0.5,
            top_p=0.5,
            top_k=2,
            min_p=0.1,
            presence_penalty=0.1,
            repetition_penalty=1.1,
            min_tokens=1,
            logprobs=2,
            logit_bias={0: 1.0},
            bad_words_token_ids=[[0]],
        )
        for params in (SamplingParams(), every_option):
            self.add_request([0], replace(params, max_tokens=3, ignore_eos=True, detokenize=False))
            while self.has_unfinished_requests:
                self.step()
        vars(self.adaptive_k).update(adaptive_k)
        self.acceptance_histogram[:] = [0] * len(self.acceptance_histogram)
        self.num_draft_tokens = self.scheduler.num_preemptions = 0
        self.scheduler.pool.num_hit_tokens = self.scheduler.pool.num_queried_tokens = 0

    # The public API

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generates outputs for one prompt or a list of prompts (text or token ids), in their order.

        `progress` shows a bar on stderr, if it is a terminal.
        """
        prompt_list = _to_prompt_list(prompts)
        params_list = list(params) if isinstance(params, Sequence) else [params] * len(prompt_list)
        if len(params_list) != len(prompt_list):
            raise UserError(
                f"params: {len(params_list)} sampling parameters for {len(prompt_list)} prompts; give one, or one each"
            )
        groups: list[RequestGroup] = []
        try:
            for prompt, own_params in zip(prompt_list, params_list, strict=True):
                groups.append(self.add_request(prompt, own_params))
            requests = [r for g in groups for r in g.requests]
            unfinished, started = requests, time.perf_counter()
            with ProgressBar() if progress else nullcontext() as bar:
                while unfinished:
                    self.step()
                    if unfinished[-1].finish_reason is not None:
                        unfinished = [r for r in unfinished if r.finish_reason is None]
                    if bar is not None:
                        rate = sum(len(r.output_token_ids) for r in requests) / (time.perf_counter() - started)
                        num_finished = sum(r.finish_reason is not None for r in requests)
                        bar.update(f"requests, {rate:,.0f} output tokens/s", num_finished, len(requests))
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
        """Generates outputs for one conversation or a list of them, in the target's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        return self.generate([self.encode_chat(c) for c in conversations], params, progress)  # type: ignore[arg-type]

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None
    ) -> Generator[CompletionOutput, None, None]:
        """Yields the output of a prompt or conversation so far, after each step that added to it. Leaving the loop
        early aborts the request."""
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        params = params or SamplingParams()
        if params.n != 1:
            raise UserError(f"--n {params.n}: a stream has one output; use n = 1")
        prompt = self.encode_chat(prompt) if is_chat else prompt  # type: ignore[arg-type]
        group = self.add_request(prompt, params, stream=True)  # type: ignore[arg-type]
        request, num_yielded = group.requests[0], 0
        try:
            while request.finish_reason is None:
                self.step()
                if len(request.output_token_ids) > num_yielded or request.finish_reason is not None:
                    num_yielded = len(request.output_token_ids)
                    yield self.build_output(group).outputs[0]
        finally:
            self.abort_group(group)

    def build_output(self, group: RequestGroup) -> RequestOutput:
        outputs = [
            CompletionOutput(
                index=r.index,
                text=r.text,
                token_ids=list(r.output_token_ids),
                finish_reason=r.finish_reason,
                stop_reason=r.stop_reason,
                logprobs=list(r.logprobs) if r.params.logprobs is not None else None,
                num_drafts=r.num_drafts,
                num_accepted_tokens_per_pos=list(r.num_accepted_tokens_per_pos),
                is_draft_token=r.is_draft_token,
                num_decode_steps=r.num_decode_steps,
            )
            for r in group.requests
        ]
        return RequestOutput(group.prompt, group.prompt_token_ids, outputs, group.finished)

    # Text

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.target.folder)

    def _decoder(self, params: SamplingParams) -> Callable[[list[int]], str]:
        return lambda ids: self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        return [int(token) for token in prompt]

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation in the target's chat template, with the generation prompt."""
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.target.folder} has no chat template; use `generate` with a plain prompt")
        encoded = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])


def _to_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # a numpy array or tensor of ids, or of rows of ids
        prompts = prompts.tolist()
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)  # type: ignore[list-item, arg-type]
