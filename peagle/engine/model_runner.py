"""A plan -> kernels: the target's pass, acceptance, the drafter's pass, and what they leave for the next round.

Knows nothing about who should run (scheduler) or about text. What a round needs lives on the device, one row
per slot of `SlotState`, so a round can be launched before the last one's tokens have been seen.

One round, for B requests with K drafts each (Q = K + 1 rows a request):

    verify   the target reads the newest token and the drafts of each request: logits and aux states for B * Q rows
    decide   chosen tokens against drafts: how many hold, and the target's own token after them
    draft    the drafter reads what was kept and K - 1 mask rows: K new drafts, in one pass

Shapes: S slots, B requests of a batch, Q rows a request, K drafts, M blocks in a table, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from peagle.config import DecoderConfig, Window
from peagle.engine.cuda_graphs import DecodeGraphs, PrefillGraphs
from peagle.engine.grammar import allowed_rows, unpack
from peagle.engine.kv_cache import BLOCK_SIZE
from peagle.engine.logits_processors import apply_logits_processors, logprob_rows
from peagle.engine.prefill import PrefillInputs, PrefillShape, pack_prefill_inputs, split_last_chunks, where
from peagle.engine.request import PrefillChunk, Request, SchedulerOutput
from peagle.kernels.attention.paged import (
    PagedAttentionMetadata,
    SingleSequenceAttention,
    paged_attention,
    prefill_attention,
)
from peagle.kernels.attention.rotary import QKNormRope
from peagle.kernels.gather import gather_rows
from peagle.kernels.host_transfer import PinnedRing, copy_to_device
from peagle.kernels.sampling.sample import argmax, sample_tokens
from peagle.kernels.sampling.verify import AcceptedTokens, accept_draft_tokens
from peagle.kernels.step.draft_inputs import build_draft_inputs, commit_state
from peagle.kernels.step.slot_updates import SlotUpdates
from peagle.kernels.step.verify_inputs import SlotState, VerifyInputs, build_verify_inputs
from peagle.kernels.triton_utils import device_context, supports_pdl
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.models.fused_cpu import FusedCpuDecoder, FusedCpuDrafter

IN_FLIGHT = 64  # tensors at most that are on their way between host and device

Choice = Callable[[Tensor, PrefillInputs[Tensor]], Tensor]  # of first tokens, from logits [F, V]


@dataclass
class KVCache:
    """Keys and values of every layer: [layers, blocks, block size, kv heads, head width]; where layers have heads of
    different widths, a list of the layers' own."""

    keys: Tensor | list[Tensor]
    values: Tensor | list[Tensor]

    @classmethod
    def make(cls, layers: int, blocks: int, kv_heads: int, head_dim: int, like: Tensor) -> KVCache:
        shape = (layers, blocks, BLOCK_SIZE, kv_heads, head_dim)
        return cls(*(torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2)))

    @classmethod
    def of(cls, cfg: DecoderConfig, blocks: int, like: Tensor) -> KVCache:
        """For a target."""
        heads = [(layer.num_kv_heads, layer.head_dim) for layer in map(cfg.layer_at, range(cfg.num_layers))]
        if len(set(heads)) == 1:
            return cls.make(cfg.num_layers, blocks, *heads[0], like)
        each = [cls.make(1, blocks, *shape, like) for shape in heads]
        return cls([one.keys[0] for one in each], [one.values[0] for one in each])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for both in (self.keys, self.values) for tensor in both)


class PagedAttention:
    """Attention of a model's layers over its pages."""

    def __init__(
        self, cache: KVCache, pages: PagedAttentionMetadata, attend: Callable[..., Tensor] = paged_attention
    ) -> None:
        self.cache, self.pages, self.attend = cache, pages, attend
        self.rotates = attend is paged_attention and cache.keys[0].is_cuda  # in the same launch
        self.one: SingleSequenceAttention | None = None
        if isinstance(cache.keys, Tensor) and isinstance(cache.values, Tensor):
            self.one = SingleSequenceAttention.try_create(cache.keys, cache.values, pages)

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGd: Tensor,
        window: Window,
        rope: QKNormRope | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if self.one is not None and window is None and sinks is None:
            return self.one(layer, q_THd, k_TGd, v_TGd)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        more = {"rope": rope} if rope is not None else {}
        pdl = supports_pdl(q_THd.device)
        return self.attend(q_THd, k_TGd, v_TGd, keys, values, self.pages, window, pdl=pdl, sinks=sinks, **more)


@dataclass
class Verified:
    """What the target said about a batch."""

    slots_B: Tensor
    inputs: VerifyInputs
    logits_TV: Tensor  # B * Q rows
    hidden_TD: Tensor | None  # the drafter's reading of the aux_hidden_states
    most: int | None = None  # positions that any request has when the round is over, drafts included; None: any


@dataclass
class PendingStep:
    """A step on its way; `wait` waits for it."""

    plan: SchedulerOutput
    rounds_host: Tensor | None  # [B, Q + 2]: emitted, accepted, available
    firsts: list[Request]
    firsts_host: Tensor | None
    done: torch.cuda.Event | None
    logprobs: dict[int, list[dict[int, float]]]  # by request id
    began: float  # by the host's clock

    def wait(self) -> tuple[list[list[int]], list[int]]:
        """Of each request that decoded: emitted tokens, -1 behind them, how many drafts held, how many there were.
        Of each prompt that was read to its end: the first token."""
        if self.done is not None:
            self.done.synchronize()
        rounds = self.rounds_host.tolist() if self.rounds_host is not None else []
        return rounds, self.firsts_host.tolist() if self.firsts_host is not None else []


def _before(most: int | None, rows: int) -> int | None:
    """Positions at most that lie before a pass over `rows` rows, if there are `most` with it."""
    return None if most is None else most - rows


class ModelRunner:
    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        max_speculative_tokens: int,
        synthetic_rates: Sequence[float] | None = None,
    ) -> None:
        """`max_model_len` bounds prompt and answer together; `synthetic_rates` are conditional ones."""
        self.target, self.drafter = target, drafter
        self.max_model_len, self.max_speculative_tokens = max_model_len, max_speculative_tokens
        weight = target.embed_tokens.weight
        self.device = weight.device
        on_cpu = self.device.type == "cpu"
        self.read = (
            FusedCpuDecoder(target) if on_cpu and FusedCpuDecoder.supports(target) else target
        )  # the target's pass
        # In a round a launch counts, and the drafter takes each tap by itself.
        self.read_round = (
            target.compute_hidden_states if self.read is target and not target.cfg.uses_transformers else self.read
        )
        self.cache = KVCache.of(target.cfg, num_blocks, weight)
        self.aux_layer_ids: tuple[int, ...] = ()
        self.mask_hidden_D: Tensor | None = None
        if drafter is not None:
            self.guess = FusedCpuDrafter(drafter) if on_cpu else drafter  # the drafter's pass
            own = drafter.cfg.layer
            self.aux_layer_ids = drafter.cfg.aux_layer_ids
            self.draft_cache = KVCache.make(
                drafter.cfg.num_layers, num_blocks, own.num_kv_heads, own.head_dim, drafter.fc.weight
            )
            self.refresh()
        self.state = SlotState.allocate(
            max_num_seqs, max_speculative_tokens, -(-max_model_len // BLOCK_SIZE), self.device
        )
        self.limits_S = torch.full((max_num_seqs + 1,), max_model_len, device=self.device)
        positions = max(m.cfg.max_positions for m in (target, drafter) if m is not None)
        for rope in [*target.ropes, *([drafter.rope] if drafter is not None else [])]:
            rope.build_cos_sin_cache(positions, weight.dtype)
        self.rates_K = None
        if synthetic_rates is not None:
            self.rates_K = torch.tensor(synthetic_rates, dtype=torch.float32, device=self.device)
        self.decode_graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self._pinned = PinnedRing(IN_FLIGHT)
        self._slot_updates = SlotUpdates(self.state, self._pinned)
        self._sent: list[tuple[int, int, int]] = [(-1, 0, 0)] * max_num_seqs  # request, its preemptions, blocks

    @torch.inference_mode()
    def refresh(self) -> None:
        """Works out anew what is made of the drafter's weights once; to be called when they have changed in place."""
        if self.drafter is not None and self.drafter.cfg.parallel:
            hidden_D = self.drafter.mask_hidden_states(1)[0]
            if self.mask_hidden_D is None:
                self.mask_hidden_D = hidden_D.contiguous()
            else:
                self.mask_hidden_D.copy_(hidden_D)  # in place: recorded rounds read it there

    def rehearse(self) -> None:
        """Compiles what no recorded round or pass holds, before anybody waits for it. Nobody's slot stays as it is."""
        self._slot_updates.set_blocks(len(self.state.num_computed_tokens_S) - 1, 0, [0])
        self._slot_updates.send()
        self._pinned.copy_to_host(self.state.num_computed_tokens_S)

    # One launch

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput, moved: list[Request]) -> PendingStep:
        began = time.perf_counter()
        logprobs: dict[int, list[dict[int, float]]] = {}
        with device_context(self.device):
            self._send(moved)
            rounds = self._round(plan, logprobs) if plan.decode_requests else None
            firsts, first_tokens = self._read(plan.prefill_chunks, logprobs) if plan.prefill_chunks else ([], None)
            done = None
            if self.device.type == "cuda":
                rounds, first_tokens = (
                    None if x is None else self._pinned.copy_to_host(x) for x in (rounds, first_tokens)
                )
                done = torch.cuda.Event()
                done.record()
        return PendingStep(plan, rounds, firsts, first_tokens, done, logprobs, began)

    def _to_device(self, values: Sequence[object]) -> Tensor:
        return copy_to_device(torch.tensor(values), self.device)

    def _send(self, moved: list[Request]) -> None:
        """Tells the device which blocks and settings changed hands."""
        for request in moved:
            if request.slot < 0:
                continue
            owner, times, sent = self._sent[request.slot]
            if (owner, times) != (request.id, request.num_preemptions):
                p, sent = request.params, 0
                self._slot_updates.set_sampling_params(
                    request.slot, (p.temperature, p.top_p, p.min_p), (p.top_k, request.seed)
                )
            self._slot_updates.set_blocks(request.slot, sent, request.block_ids[sent:])
            self._sent[request.slot] = (request.id, request.num_preemptions, len(request.block_ids))
        moved.clear()
        self._slot_updates.send()

    # A round

    def _round(self, plan: SchedulerOutput, logprobs: dict[int, list[dict[int, float]]]) -> Tensor:
        """[B, Q + 2]: emitted tokens, how many drafts were accepted, how many there were."""
        slots = [r.slot for r in plan.decode_requests]
        if plan.limited_requests:
            which = self._to_device([(r.slot, r.params.max_speculative_tokens) for r in plan.limited_requests])
            num_draft_tokens_S, limited = self.state.num_draft_tokens_S, which[:, 0]
            num_draft_tokens_S[limited] = torch.minimum(num_draft_tokens_S[limited], which[:, 1])
        if self.decode_graphs is not None and not plan.needs_logits_processing:
            recorded = self.decode_graphs.find(
                len(slots),
                plan.num_draft_tokens,
                max(r.num_tokens + r.max_in_flight_tokens for r in plan.decode_requests),
            )
            if recorded is not None:
                recorded.load(slots)
                recorded.replay()
                return recorded.result_BX[: len(plan.decode_requests)]
        slots_B = self._to_device(slots)
        if not plan.needs_logits_processing:
            return self.decode_step(slots_B, plan.num_draft_tokens)
        bound = [r for r in plan.decode_requests if r.matcher is not None]
        drafts = self._known_drafts(bound, plan.num_draft_tokens)
        verified = self.verify(slots_B, plan.num_draft_tokens)
        allowed = self._allowed(bound, drafts)  # worked out on the host while the target reads
        return self.draft(verified, self.decide_shaped(verified, plan.decode_requests, logprobs, allowed))

    def _known_drafts(self, requests: list[Request], k: int) -> list[list[int]]:
        if not requests or k == 0:
            return [[] for _ in requests]
        return self.state.token_ids_SN[self._to_device([r.slot for r in requests]), 1 : k + 1].tolist()

    def _allowed(self, requests: list[Request], drafts: list[list[int]]) -> dict[int, Tensor]:
        """What the grammars of requests allow after their output and their drafts, by request id: bool [Q, V]."""
        asked = [(r.matcher, own) for r, own in zip(requests, drafts, strict=True) if r.matcher is not None]
        if not asked:
            return {}
        allowed_NQV = unpack(copy_to_device(allowed_rows(asked), self.device), self.target.cfg.vocab_size)
        return {r.id: rows for r, rows in zip(requests, allowed_NQV, strict=True)}

    def decode_step(self, slots_B: Tensor, k: int, most: int | None = None) -> Tensor:
        verified = self.verify(slots_B, k, most)
        return self.draft(verified, self.decide(verified))

    def verify(self, slots_B: Tensor, k: int, most: int | None = None) -> Verified:
        rows = build_verify_inputs(self.state, slots_B, k, self.max_model_len)
        pages = PagedAttentionMetadata(
            rows.block_tables_BM,
            rows.num_computed_tokens_B,
            rows.query_lens_B,
            k + 1,
            max_computed_tokens=_before(most, k + 1),
        )
        attend = PagedAttention(self.cache, pages)
        hidden, aux_hidden_states = self.read_round(
            rows.token_ids_BQ.flatten(), rows.positions_T, attend, self.aux_layer_ids
        )
        combined = (
            self.drafter.combine_hidden_states(aux_hidden_states)
            if self.drafter is not None and aux_hidden_states is not None
            else None
        )
        return Verified(slots_B, rows, self.target.compute_logits(hidden), combined, most)

    def decide(self, v: Verified) -> AcceptedTokens:
        """How many drafts hold, and the tokens they and the target's own make."""
        return self._accept(v, self._choose(v.logits_TV, v.inputs))

    @staticmethod
    def _choose(logits_TV: Tensor, i: VerifyInputs) -> Tensor:
        chosen = sample_tokens(
            logits_TV, i.temperature_T, i.top_k_T, i.top_p_T, i.min_p_T, i.seed_T, i.sample_positions_T
        )
        return chosen.view(i.token_ids_BQ.shape)

    def _accept(self, v: Verified, chosen_BQ: Tensor) -> AcceptedTokens:
        i, rates, seeds, firsts = v.inputs, self.rates_K, v.inputs.seed_T, v.inputs.sample_positions_T
        if rates is not None:
            rows = chosen_BQ.shape[1]
            rates, seeds, firsts = rates[: rows - 1], seeds[::rows], firsts[::rows]
        return accept_draft_tokens(i.token_ids_BQ, chosen_BQ, i.num_draft_tokens_B, rates, seeds, firsts)

    def decide_shaped(
        self,
        v: Verified,
        requests: list[Request],
        logprobs: dict[int, list[dict[int, float]]],
        allowed: dict[int, Tensor],
    ) -> AcceptedTokens:
        """As `decide`, for a batch in which some requests shape their logits or want them back."""
        batch, rows = v.inputs.token_ids_BQ.shape
        raw_BQV = v.logits_TV.view(batch, rows, -1)
        shaped_BQV = raw_BQV.to(torch.float32, copy=True)
        for b, r in enumerate(requests):
            if r.needs_logits_processing:
                drafts_K = v.inputs.token_ids_BQ[b, 1:]
                shaped_BQV[b] = apply_logits_processors(
                    raw_BQV[b],
                    r.params,
                    r.prompt_token_ids,
                    r.output_token_ids,
                    drafts_K,
                    r.all_stop_token_ids,
                    allowed.get(r.id),
                )
        said = self._accept(v, self._choose(shaped_BQV.flatten(0, 1), v.inputs))
        wanted = [(b, r) for b, r in enumerate(requests) if r.params.logprobs is not None]
        if wanted:
            counts, emitted = said.num_accepted_B.tolist(), said.output_token_ids_BQ.tolist()
            for b, r in wanted:
                logprobs[r.id] = logprob_rows(raw_BQV[b], emitted[b][: counts[b] + 1], r.params.logprobs or 0)
        return said

    def draft(self, v: Verified, said: AcceptedTokens) -> Tensor:
        """New drafts for each request, and the state of the slots moved on; the round's result."""
        accepted_B, emitted_BQ, result_BX = said
        k = v.inputs.token_ids_BQ.shape[1] - 1
        drafts_BK = emitted_BQ[:, :0]
        if self.drafter is not None:
            drafts_BK = self._drafts(v, accepted_B, emitted_BQ, k)
        s = self.state
        commit_state(s, v.slots_B, emitted_BQ, accepted_B, drafts_BK, self.max_model_len)
        return result_BX

    def _drafts(self, v: Verified, accepted_B: Tensor, emitted_BQ: Tensor, k: int) -> Tensor:
        drafter, mask_id = self.drafter, self.drafter.cfg.mask_token_id if self.drafter is not None else None
        assert drafter is not None and v.hidden_TD is not None
        batch = len(emitted_BQ)
        limits_B = self.limits_S[:batch]
        starts_B, tables_BM = v.inputs.num_computed_tokens_B, v.inputs.block_tables_BM
        kept_BQ, hidden_TD = emitted_BQ, v.hidden_TD
        if batch == 1 and self.device.type == "cpu":  # where rows cost and asking how many hold does not
            held = int(accepted_B) + 1
            kept_BQ, hidden_TD = emitted_BQ[:, :held], hidden_TD[:held]
        rows = build_draft_inputs(kept_BQ, accepted_B, starts_B, hidden_TD, self.mask_hidden_D, mask_id, k, limits_B)
        count = len(rows.token_ids_R) // batch
        pages = PagedAttentionMetadata(
            tables_BM, starts_B, rows.query_lens_B, count, max_computed_tokens=_before(v.most, count)
        )
        attend = PagedAttention(self.draft_cache, pages)
        silent = {"kv_only": True} if k == 0 and isinstance(self.guess, FusedCpuDrafter) else {}
        said, handed_on = self.guess(rows.token_ids_R, rows.hidden_states_RD, rows.positions_R, attend, **silent)
        if k == 0:
            return emitted_BQ[:, :0]
        wanted = rows.sample_rows_BK.flatten()
        guesses = drafter.to_target_ids(argmax(drafter.compute_logits(gather_rows(said, wanted))))
        if mask_id is not None:
            return guesses.view(batch, k)
        first_B = starts_B + accepted_B + 1
        return self.one_by_one(guesses, gather_rows(handed_on, wanted), first_B, tables_BM, k, v.most)

    def one_by_one(
        self,
        guess_B: Tensor,
        hidden_BD: Tensor,
        position_B: Tensor,
        tables_BM: Tensor,
        k: int,
        most: int | None = None,
    ) -> Tensor:
        """EAGLE-3: each further guess from the last one and the drafter's own output; first row at `position`."""
        assert self.drafter is not None
        guesses = [guess_B]
        # For all guesses at once: a launch each for where one row lies takes longer than the row.
        ahead_SB = position_B + torch.arange(k - 1, device=self.device)[:, None]
        at_SB = ahead_SB.clamp(max=self.max_model_len - 1)
        starts_SB, live_SB = at_SB.int(), (self.max_model_len - ahead_SB).clamp(0, 1).int()
        for at_B, starts_B, live_B in zip(at_SB, starts_SB, live_SB, strict=True):
            pages = PagedAttentionMetadata(tables_BM, starts_B, live_B, 1, max_computed_tokens=_before(most, 1))
            attend = PagedAttention(self.draft_cache, pages)
            said, hidden_BD = self.guess(guesses[-1], hidden_BD, at_B, attend)
            guesses.append(self.drafter.to_target_ids(argmax(self.drafter.compute_logits(said))))
        return torch.stack(guesses, 1)

    # Prompts

    @property
    def masks(self) -> int | None:
        """Rows of the drafter behind a prompt's end."""
        if self.drafter is None:
            return None
        return max(self.max_speculative_tokens - 1, 0) if self.drafter.cfg.parallel else 0

    def _read(
        self, chunks: list[PrefillChunk], logprobs: dict[int, list[dict[int, float]]]
    ) -> tuple[list[Request], Tensor | None]:
        """Reads chunks; whose prompts they end for the first time, and the tokens that follow."""
        fresh, again = split_last_chunks(chunks)
        room = PrefillShape.of(chunks, self.masks)
        shaped = any(r.needs_logits_processing for r in fresh)
        mask_id = self.drafter.cfg.mask_token_id if self.drafter is not None else None
        recorded = self.prefill_graphs.find(room) if self.prefill_graphs is not None and not shaped else None
        packed = pack_prefill_inputs(
            chunks, fresh + again, recorded.room if recorded is not None else room, self.max_model_len, mask_id
        )
        if recorded is not None:
            said_F = recorded.replay(packed)
        else:
            choice = partial(self._choose_shaped, fresh, logprobs) if shaped else self.sample_first_tokens
            said_F = self.prefill(copy_to_device(torch.from_numpy(packed), self.device), room, choice)
        return fresh, said_F[: len(fresh)] if fresh else None

    def prefill(self, packed: Tensor, room: PrefillShape, choice: Choice) -> Tensor:
        """[F]: the token that follows each prompt that ends; their slots are ready to decode."""
        p: PrefillInputs[Tensor] = PrefillInputs.cut(packed, room)
        places, draft_places = where(packed.int(), room, self.state.block_tables_SM[p.slots_B])
        attend = PagedAttention(self.cache, places, prefill_attention)
        hidden, aux_hidden_states = self.read(p.tokens_T, p.positions_T, attend, self.aux_layer_ids)
        said_F = p.known_F
        if room.ends:
            said_F = choice(self.target.compute_logits(hidden[p.last_F]), p)
        newest_F = torch.where(p.known_F < 0, said_F, p.known_F)
        drafts_FK = newest_F[:, None][:, :0]
        if aux_hidden_states is not None:
            drafts_FK = self._draft_after(p, room, newest_F, aux_hidden_states, draft_places)
        if room.ends:
            s, none = self.state, torch.zeros_like(newest_F)
            begun = (p.slots_F, newest_F[:, None], none, drafts_FK, self.max_model_len, p.ends_F)
            commit_state(s, *begun)
        return said_F

    def sample_first_tokens(self, logits_FV: Tensor, p: PrefillInputs[Tensor]) -> Tensor:
        temperature_F, top_p_F, min_p_F = self.state.float_params_3S[:, p.slots_F]
        top_k_F, seed_F = self.state.int_params_2S[:, p.slots_F]
        return sample_tokens(logits_FV, temperature_F, top_k_F, top_p_F, min_p_F, seed_F, p.ends_F)

    def _choose_shaped(
        self,
        fresh: list[Request],
        logprobs: dict[int, list[dict[int, float]]],
        logits_FV: Tensor,
        p: PrefillInputs[Tensor],
    ) -> Tensor:
        """As `sample_first_tokens`, where some of the new prompts shape their logits or want them back."""
        shaped_FV = logits_FV.to(torch.float32, copy=True)
        none = torch.empty(0, dtype=torch.long, device=self.device)
        bound = [r for r in fresh if r.matcher is not None]
        allowed = self._allowed(bound, [[] for _ in bound])
        for f, r in enumerate(fresh):
            if r.needs_logits_processing:
                row, rules = logits_FV[f : f + 1], allowed.get(r.id)
                shaped_FV[f] = apply_logits_processors(
                    row, r.params, r.prompt_token_ids, [], none, r.all_stop_token_ids, rules
                )[0]
        said_F = self.sample_first_tokens(shaped_FV, p)
        wanted = [(f, r) for f, r in enumerate(fresh) if r.params.logprobs is not None]
        if wanted:
            said = said_F.tolist()
            for f, r in wanted:
                logprobs[r.id] = logprob_rows(logits_FV[f : f + 1], [said[f]], r.params.logprobs or 0)
        return said_F

    def _draft_after(
        self,
        p: PrefillInputs[Tensor],
        room: PrefillShape,
        newest_F: Tensor,
        aux_hidden_states_TN: Tensor,
        places: PagedAttentionMetadata,
    ) -> Tensor:
        """The drafter reads the same, and mask rows behind the ends; drafts for these."""
        drafter, k, tokens_R = self.drafter, self.max_speculative_tokens if room.ends else 0, p.draft_tokens_R
        assert drafter is not None
        hidden_RD = drafter.combine_hidden_states(aux_hidden_states_TN)
        if room.ends:
            tokens_R = torch.where(tokens_R < 0, newest_F[(-1 - tokens_R).clamp(min=0)], tokens_R)
        if room.masks and room.ends:
            assert self.mask_hidden_D is not None
            hidden_RD = torch.cat([hidden_RD, self.mask_hidden_D[None]])[p.draft_source_R]
        attend = PagedAttention(self.draft_cache, places, prefill_attention)
        said, handed_on = self.guess(tokens_R, hidden_RD, p.draft_positions_R, attend)
        if k == 0:
            return newest_F[:, None][:, :0]
        if drafter.cfg.parallel:
            wanted = (p.guess_F[:, None] + torch.arange(k, device=self.device)).flatten()
            return drafter.to_target_ids(argmax(drafter.compute_logits(said[wanted]))).view(-1, k)
        guess_F = drafter.to_target_ids(argmax(drafter.compute_logits(said[p.guess_F])))
        tables_FM = self.state.block_tables_SM[p.slots_F]
        return self.one_by_one(guess_F, handed_on[p.guess_F], p.ends_F, tables_FM, k)
