"""Acceptance from the embedded engine in one pass for all K, and from the slow reference implementation.

The engine answers each data set once per temperature. The next token of a response is decided by the target alone:
greedily, or by noise that depends on (seed, position, token). So it is the same for every drafter and K, and a
drafter's proposal at a position depends only on the tokens before it. Target and drafter therefore run over the
finished responses as in training, with a chain of K - 1 mask rows at every position, and the length of the correct run
there is all that `replay_drafts` needs for any K. EAGLE-3's later draft tokens depend on its own earlier ones, but a
later one counts only if the earlier ones equal the response, so it may be given the response's tokens.

Responses are extended by K - 1 tokens beyond their end: draft tokens are counted before the output is cut.

Shapes: N tokens of a packed batch, R rows of a chunk, A anchors, D hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoints.drafter import load_drafter
from peagle.checkpoints.target import load_target
from peagle.config import EvalSettings
from peagle.data.batches import PackedBatch
from peagle.engine.llm import LLM
from peagle.eval.conversations import CompletedTurn, ConversationRunner, EvalJob, EvalRequest, EvalResponse, Evaluator
from peagle.eval.samples import AcceptanceSample, DraftResult, replay_drafts
from peagle.kernels.sampling.sample import argmax
from peagle.models.drafter import Drafter
from peagle.speculative import reference
from peagle.training.cod_sampling import all_cod_positions
from peagle.training.hidden_states.online import OnlineHiddenStates
from peagle.training.partition import DrafterForward, split_chains


@dataclass(frozen=True)
class ExtendedResponse:
    """A response, and all its tokens: prompt, output, and what the target would generate after the end."""

    turn: CompletedTurn
    token_ids: list[int]


class EmbeddedEvaluator(Evaluator):
    measures_all_k = True

    def __init__(self, target: Path, runner: ConversationRunner, engine_options: dict[str, Any]) -> None:
        super().__init__(runner)
        self.llm = LLM(
            target,
            None,
            max_model_len=runner.max_model_len,
            tokenizer=False,
            cuda_graphs=False,  # capturing them takes longer than they save here
            gpu_memory_utilization=self.settings.gpu_memory_utilization,
            **engine_options,
        )
        self.dtype = self.llm.dtype
        self._responses: dict[tuple[str, float], list[ExtendedResponse]] = {}

    def measure(self, job: EvalJob) -> Iterator[tuple[int, list[AcceptanceSample]]]:
        assert job.drafter.folder is not None
        key = (job.dataset.name, job.temperature)
        if key not in self._responses:
            turns = self.runner.run(job.dataset.prompts.rows, job.temperature, self._complete)
            self._responses[key] = self._extend_responses(turns)
        responses = self._responses[key]
        model = self.llm.target.model
        weight = model.embed_tokens.weight
        drafter = load_drafter(job.drafter.folder, model, weight.dtype, weight.device)
        runs = self._compute_correct_runs(drafter, responses, max(job.ks))
        for k in job.ks:
            yield k, [self._build_sample(response, run, k) for response, run in zip(responses, runs, strict=True)]

    def _build_sample(self, response: ExtendedResponse, run: dict[int, int], k: int) -> AcceptanceSample:
        turn = response.turn
        num_prompt_tokens, num_output_tokens = len(turn.request.prompt_token_ids), len(turn.response.token_ids)
        drafts = replay_drafts(num_prompt_tokens, num_output_tokens, run, k, self.runner.max_model_len)
        return turn.build_sample(drafts, k)

    @torch.inference_mode()
    def _compute_correct_runs(
        self, drafter: Drafter, responses: Sequence[ExtendedResponse], num_depths: int
    ) -> list[dict[int, int]]:
        """For each response: number n of known tokens -> how many of the next tokens the drafter predicts, in a row.

        Runs are at most `num_depths` long. The row at position n - 2 has the newest token and predicts the next one.
        """
        runs: list[dict[int, int]] = []
        hidden_states = OnlineHiddenStates(self.llm.target.model, drafter.cfg.aux_layer_ids)
        for group in _pack(responses, self.settings.replay_tokens):
            batch = _build_batch(group)
            run_N = _batch_runs(drafter, hidden_states, batch, num_depths, self.settings)
            for response, run in zip(group, run_N.split([len(r.token_ids) for r in group]), strict=True):
                first = len(response.turn.request.prompt_token_ids) + 1
                runs.append(dict(enumerate(run[first - 2 : -2].tolist(), first)))
            self.on_progress("drafting", len(runs), len(responses))
        return runs

    def _complete(self, requests: list[EvalRequest]) -> list[EvalResponse]:
        """As `LLM.generate`, with progress."""
        groups = [self.llm.add_request(request.prompt_token_ids, request.params) for request in requests]
        while self.llm.has_unfinished_requests:
            if any(request.finish_reason is not None for request in self.llm.step()):
                self.on_progress("responses", sum(group.finished for group in groups), len(groups))
        outputs = [self.llm.build_output(group).outputs[0] for group in groups]
        return [EvalResponse(o.token_ids, o.finish_reason or "length", len(o.token_ids)) for o in outputs]

    def _extend_responses(self, turns: list[CompletedTurn]) -> list[ExtendedResponse]:
        """Generates the tokens after the end of a response that a draft may reach."""
        max_k, max_model_len = max(self.settings.num_speculative_tokens), self.runner.max_model_len
        responses = [ExtendedResponse(t, t.request.prompt_token_ids + t.response.token_ids) for t in turns]
        lengths = [min(max_k - 1, max_model_len - len(response.token_ids)) for response in responses]
        to_extend = [(r, length) for r, length in zip(responses, lengths, strict=True) if length > 0]
        params = [replace(r.turn.request.params, max_tokens=length, ignore_eos=True) for r, length in to_extend]
        outputs = self.llm.generate([r.token_ids for r, _ in to_extend], params)
        for (response, _), output in zip(to_extend, outputs, strict=True):
            response.token_ids.extend(output.outputs[0].token_ids)
        return responses


def _batch_runs(
    drafter: Drafter, source: OnlineHiddenStates, batch: PackedBatch, num_depths: int, settings: EvalSettings
) -> Tensor:
    """[N]: length of the correct run after each position.

    Logits of a chain's next row are computed only if all rows before it were correct: with a large vocabulary they are
    most of the work.
    """
    states = source.states(batch)
    forward = DrafterForward(drafter, states, batch, states.hidden_ND.device)
    depth_zero = forward.run_depth_zero()
    run_N = torch.zeros(len(batch), dtype=torch.long)
    max_rows = max(settings.replay_logits // drafter.cfg.draft_vocab_size, 1)
    for chunk in split_chains(all_cod_positions(batch, num_depths), settings.replay_rows):
        anchor_A = chunk.anchor_A
        correct = _is_correct(drafter, depth_zero.output_ND, anchor_A, anchor_A + 2, forward, max_rows)
        run_N[anchor_A[correct]] = 1
        if not len(chunk.anchor_R):
            continue
        output_RD = forward.run_chains(depth_zero, chunk)
        for depth in range(1, int(chunk.depth_R.max()) + 1):
            rows = ((chunk.depth_R == depth) & (run_N[chunk.anchor_R] == depth)).nonzero()[:, 0]
            if not len(rows):
                break
            anchors = chunk.anchor_R[rows]
            correct = _is_correct(drafter, output_RD, rows, anchors + depth + 2, forward, max_rows)
            run_N[anchors[correct]] = depth + 1
    return run_N


def _is_correct(
    drafter: Drafter, output_RD: Tensor, rows: Tensor, labels: Tensor, forward: DrafterForward, max_rows: int
) -> Tensor:
    """Whether each row's draft token equals the token at position `labels`; logits of at most max_rows at once."""
    parts = []
    for some_rows, some_labels in zip(rows.split(max_rows), labels.split(max_rows), strict=True):
        draft_ids = drafter.to_target_ids(argmax(drafter.compute_logits(output_RD[forward.to_device(some_rows)])))
        parts.append((draft_ids == forward.token_N[forward.to_device(some_labels)]).cpu())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _pack(responses: Sequence[ExtendedResponse], max_tokens: int) -> Iterator[list[ExtendedResponse]]:
    """Groups of consecutive responses with at most max_tokens; a longer response is a group of its own."""
    group: list[ExtendedResponse] = []
    for response in responses:
        if group and sum(len(r.token_ids) for r in group) + len(response.token_ids) > max_tokens:
            yield group
            group = []
        group.append(response)
    if group:
        yield group


def _build_batch(responses: Sequence[ExtendedResponse]) -> PackedBatch:
    size = torch.tensor([len(response.token_ids) for response in responses])
    prompt = torch.tensor([len(response.turn.request.prompt_token_ids) for response in responses])
    end = size.cumsum(0)
    start_N = (end - size).repeat_interleave(size)
    index_N = torch.arange(int(end[-1]))
    return PackedBatch(
        torch.tensor([token for response in responses for token in response.token_ids]),  # type: ignore[arg-type]
        index_N - start_N,  # type: ignore[arg-type]
        start_N,  # type: ignore[arg-type]
        end.repeat_interleave(size),  # type: ignore[arg-type]
        index_N - start_N >= prompt.repeat_interleave(size),  # type: ignore[arg-type]
        tuple(response.turn.request.row.id for response in responses),
    )


class ReferenceEvaluator(Evaluator):
    """The plain fp32 implementation, one request at a time: slow, for small models and debugging."""

    dtype = "float32"

    def __init__(self, target: Path, runner: ConversationRunner, device: str) -> None:
        super().__init__(runner)
        self.device = device
        self.target = load_target(target, torch.float32, device)

    def measure(self, job: EvalJob) -> Iterator[tuple[int, list[AcceptanceSample]]]:
        assert job.drafter.folder is not None
        drafter = load_drafter(job.drafter.folder, self.target.model, torch.float32, self.device)
        for k in job.ks:
            complete = partial(self._complete, drafter=drafter, k=k)
            turns = self.runner.run(job.dataset.prompts.rows, job.temperature, complete)
            yield k, [turn.build_sample(turn.response.drafts, k) for turn in turns]

    def _complete(self, requests: list[EvalRequest], drafter: Drafter, k: int) -> list[EvalResponse]:
        responses = []
        model, eos_ids, max_model_len = self.target.model, self.target.eos_ids, self.runner.max_model_len
        for i, request in enumerate(requests):
            output = reference.generate(
                model, request.prompt_token_ids, request.params, eos_ids, drafter, k, max_model_len
            )
            drafts, n = [], len(request.prompt_token_ids) + 1
            for step in output.steps:
                if step.draft_token_ids:
                    drafts.append(DraftResult(n, step.num_accepted_tokens, len(step.output_token_ids)))
                n += len(step.output_token_ids)
            token_ids = output.token_ids
            responses.append(EvalResponse(token_ids, output.finish_reason, len(token_ids), tuple(drafts)))
            self.on_progress("responses", i + 1, len(requests))
        return responses
