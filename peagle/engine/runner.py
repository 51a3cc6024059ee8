"""A plan -> kernels: the target's pass, acceptance, the drafter's pass, and what they leave for the next round.

Knows nothing about who should run (scheduler) or about text. What a round needs lives on the device, one row
per slot of `SlotState`, so a round can be launched before the last one's tokens have been seen.

One round, for B requests with K drafts each (Q = K + 1 rows a request):

    verify   the target reads the newest token and the drafts of each request: logits and taps for B * Q rows
    decide   chosen tokens against drafts: how many hold, and the target's own token after them
    draft    the drafter reads what was kept and K - 1 mask rows: K new drafts, in one pass

Shapes: S slots, B requests of a batch, Q rows a request, K drafts, M blocks in a table, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.config import DecoderConfig, Window
from peagle.engine.grammar import allowed_rows, unpack
from peagle.engine.graphs import ChunkGraphs, GuessGraphs, Pass, RoundGraphs
from peagle.engine.kv_cache import BLOCK_SIZE
from peagle.engine.request import Chunk, Plan, Request
from peagle.engine.shaping import logprob_rows, shape_rows
from peagle.kernels.draft_inputs import commit_state, draft_inputs
from peagle.kernels.launching import supports_pdl
from peagle.kernels.paged_attention import OneSequence, Pages, paged_attention, prefill_attention
from peagle.kernels.rotary import Rotation
from peagle.kernels.round_inputs import RoundInputs, SlotState, round_inputs
from peagle.kernels.sampling import argmax, choose
from peagle.kernels.sending import sent
from peagle.kernels.verify import accept
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.models.flat import FlatDecoder, FlatDrafter

Passed = tuple[Tensor, Tensor | None]


@dataclass
class Cache:
    """Keys and values of every layer: [layers, blocks, block size, kv heads, head width]; where layers have heads of
    different widths, a list of the layers' own."""

    keys: Tensor | list[Tensor]
    values: Tensor | list[Tensor]

    @classmethod
    def make(cls, layers: int, blocks: int, kv_heads: int, head_dim: int, like: Tensor) -> Cache:
        shape = (layers, blocks, BLOCK_SIZE, kv_heads, head_dim)
        return cls(*(torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2)))

    @classmethod
    def of(cls, cfg: DecoderConfig, blocks: int, like: Tensor) -> Cache:
        """For a target."""
        heads = [(layer.num_kv_heads, layer.head_dim) for layer in map(cfg.layer_at, range(cfg.num_layers))]
        if len(set(heads)) == 1:
            return cls.make(cfg.num_layers, blocks, *heads[0], like)
        each = [cls.make(1, blocks, *shape, like) for shape in heads]
        return cls([one.keys[0] for one in each], [one.values[0] for one in each])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for both in (self.keys, self.values) for tensor in both)


class PagedAttend:
    """Attention of a model's layers over its pages."""

    def __init__(self, cache: Cache, pages: Pages, attend: Callable[..., Tensor] = paged_attention) -> None:
        self.cache, self.pages, self.attend = cache, pages, attend
        self.rotates = attend is paged_attention and cache.keys[0].is_cuda  # in the same launch
        self.one: OneSequence | None = None
        if isinstance(cache.keys, Tensor) and isinstance(cache.values, Tensor):
            self.one = OneSequence.find(cache.keys, cache.values, pages)

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGd: Tensor,
        window: Window,
        rotation: Rotation | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if self.one is not None and window is None and sinks is None:
            return self.one(layer, q_THd, k_TGd, v_TGd)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        more = {"rotation": rotation} if rotation is not None else {}
        pdl = supports_pdl(q_THd.device)
        return self.attend(q_THd, k_TGd, v_TGd, keys, values, self.pages, window, pdl=pdl, sinks=sinks, **more)


@dataclass
class Verified:
    """What the target said about a batch."""

    slots_B: Tensor
    inputs: RoundInputs
    logits_TV: Tensor  # B * Q rows
    hidden_TD: Tensor | None  # the drafter's reading of the taps


@dataclass
class Launched:
    """A step on its way; `wait` waits for it."""

    plan: Plan
    rounds_host: Tensor | None  # [B, Q + 2]: emitted, accepted, available
    firsts: list[Request]
    firsts_host: Tensor | None
    done: torch.cuda.Event | None
    logprobs: dict[int, list[dict[int, float]]]  # by request id

    def wait(self) -> tuple[list[list[int]], list[int]]:
        """Of each request that decoded: emitted tokens, -1 behind them, how many drafts held, how many there were.
        Of each prompt that was read to its end: the first token."""
        if self.done is not None:
            self.done.synchronize()
        rounds = self.rounds_host.tolist() if self.rounds_host is not None else []
        return rounds, self.firsts_host.tolist() if self.firsts_host is not None else []


class Runner:
    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        num_blocks: int,
        max_num_seqs: int,
        longest: int,
        most_drafts: int,
        synthetic_rates: Sequence[float] | None = None,
    ) -> None:
        """`longest` bounds prompt and answer together; `synthetic_rates` are conditional ones."""
        self.target, self.drafter = target, drafter
        self.longest, self.most_drafts = longest, most_drafts
        weight = target.embed_tokens.weight
        self.device = weight.device
        on_cpu = self.device.type == "cpu"
        self.read = FlatDecoder(target) if on_cpu and FlatDecoder.takes(target) else target  # the target's pass
        self.cache = Cache.of(target.cfg, num_blocks, weight)
        self.taps: tuple[int, ...] = ()
        self.mask_hidden_D: Tensor | None = None
        if drafter is not None:
            self.guess = FlatDrafter(drafter) if on_cpu else drafter  # the drafter's pass
            own = drafter.cfg.layer
            self.taps = drafter.cfg.taps
            self.draft_cache = Cache.make(
                drafter.cfg.num_layers, num_blocks, own.num_kv_heads, own.head_dim, drafter.fc.weight
            )
            self.refresh()
        self.state = SlotState.make(max_num_seqs, most_drafts, -(-longest // BLOCK_SIZE), self.device)
        self.limits_S = torch.full((max_num_seqs + 1,), longest, device=self.device)
        positions = max(m.cfg.max_positions for m in (target, drafter) if m is not None)
        for rope in [*target.ropes, *([drafter.rope] if drafter is not None else [])]:
            rope.tabulate(positions, weight.dtype)
        self.rates_K = None
        if synthetic_rates is not None:
            self.rates_K = torch.tensor(synthetic_rates, dtype=torch.float32, device=self.device)
        self.graphs: RoundGraphs | None = None
        self.target_chunks: ChunkGraphs | None = None
        self.drafter_chunks: ChunkGraphs | None = None
        self.first_guesses: GuessGraphs | None = None
        self._sent: list[tuple[int, int, int]] = [(-1, 0, 0)] * max_num_seqs  # request, its preemptions, blocks

    @torch.inference_mode()
    def refresh(self) -> None:
        """Works out anew what is made of the drafter's weights once; to be called when they have changed in place."""
        if self.drafter is not None and self.drafter.cfg.parallel:
            hidden_D = self.drafter.masked(1)[0]
            if self.mask_hidden_D is None:
                self.mask_hidden_D = hidden_D.contiguous()
            else:
                self.mask_hidden_D.copy_(hidden_D)  # in place: recorded rounds read it there

    def prepare_prompts(self, rows: Sequence[int], sizes: Sequence[int]) -> None:
        """What `graphs` is to record beside the rounds: passes over these many prompt rows, and drafts one by one for
        these many prompts."""
        blocks, like = self.state.block_tables_SM.shape[1], self.target.embed_tokens.weight
        self.target_chunks = ChunkGraphs(self.read_target, rows, None, blocks, like)
        if self.drafter is None:
            return
        width, k = self.drafter.cfg.layer.hidden_size, self.most_drafts
        self.drafter_chunks = ChunkGraphs(self.read_drafter, rows, width, blocks, like)
        if not self.drafter.cfg.parallel and k > 1:
            self.first_guesses = GuessGraphs(self.one_by_one, sizes, k, width, blocks, self.longest, like)

    @property
    def beside_rounds(self) -> list[ChunkGraphs | GuessGraphs]:
        made = (self.target_chunks, self.drafter_chunks, self.first_guesses)
        return [graphs for graphs in made if graphs is not None]

    # One launch

    @torch.inference_mode()
    def launch(self, plan: Plan, moved: list[Request]) -> Launched:
        self._send(moved)
        logprobs: dict[int, list[dict[int, float]]] = {}
        rounds = self._round(plan, logprobs) if plan.decoding else None
        firsts = [c.request for c in plan.chunks if c.final and not c.request.output_ids]
        first_tokens = self._read(plan.chunks, logprobs) if plan.chunks else None
        return self._return(plan, rounds, firsts, first_tokens, logprobs)

    def _return(
        self,
        plan: Plan,
        rounds: Tensor | None,
        firsts: list[Request],
        first_tokens: Tensor | None,
        logprobs: dict[int, list[dict[int, float]]],
    ) -> Launched:
        if self.device.type != "cuda":
            return Launched(plan, rounds, firsts, first_tokens, None, logprobs)

        def on_host(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

        hosts = on_host(rounds), on_host(first_tokens)
        done = torch.cuda.Event()
        done.record()
        return Launched(plan, hosts[0], firsts, hosts[1], done, logprobs)

    def _to_device(self, values: Sequence[object], dtype: torch.dtype = torch.long) -> Tensor:
        host = torch.tensor(values, dtype=dtype)
        return sent(host, self.device)

    def _send(self, moved: list[Request]) -> None:
        """Tells the device which blocks and settings changed hands."""
        tables, settings, numbers = [], [], []
        for request in moved:
            if request.slot < 0:
                continue
            owner, times, sent = self._sent[request.slot]
            if (owner, times) != (request.id, request.preemptions):
                p, sent = request.params, 0
                settings.append((p.temperature, p.top_p, p.min_p))
                numbers.append((request.slot, p.top_k, request.seed))
            tables += [(request.slot, i, request.blocks[i]) for i in range(sent, len(request.blocks))]
            self._sent[request.slot] = (request.id, request.preemptions, len(request.blocks))
        moved.clear()
        if tables:
            where = self._to_device(tables)
            self.state.block_tables_SM[where[:, 0], where[:, 1]] = where[:, 2].int()
        if settings:
            which, floats = self._to_device(numbers), self._to_device(settings, torch.float32)
            slots = which[:, 0]
            s = self.state
            s.temperature_S[slots], s.top_p_S[slots], s.min_p_S[slots] = floats[:, 0], floats[:, 1], floats[:, 2]
            s.top_k_S[slots], s.seed_S[slots] = which[:, 1], which[:, 2]

    # A round

    def _round(self, plan: Plan, logprobs: dict[int, list[dict[int, float]]]) -> Tensor:
        """[B, Q + 2]: emitted tokens, how many drafts were accepted, how many there were."""
        slots = [r.slot for r in plan.decoding]
        if plan.limited:
            which = self._to_device([(r.slot, r.params.draft_tokens) for r in plan.limited])
            available_S, limited = self.state.available_S, which[:, 0]
            available_S[limited] = torch.minimum(available_S[limited], which[:, 1])
        if self.graphs is not None and not plan.shaped:
            recorded = self.graphs.find(len(slots), plan.drafts)
            if recorded is not None:
                recorded.load(slots, self._to_device)
                recorded.replay()
                return recorded.result_BX[: len(plan.decoding)]
        slots_B = self._to_device(slots)
        if not plan.shaped:
            return self.round(slots_B, plan.drafts)
        bound = [r for r in plan.decoding if r.grammar is not None]
        drafts = self._known_drafts(bound, plan.drafts)
        verified = self.verify(slots_B, plan.drafts)
        allowed = self._allowed(bound, drafts)  # worked out on the host while the target reads
        return self.draft(verified, *self.decide_shaped(verified, plan.decoding, logprobs, allowed))

    def _known_drafts(self, requests: list[Request], k: int) -> list[list[int]]:
        if not requests or k == 0:
            return [[] for _ in requests]
        return self.state.tokens_SN[self._to_device([r.slot for r in requests]), 1 : k + 1].tolist()

    def _allowed(self, requests: list[Request], drafts: list[list[int]]) -> dict[int, Tensor]:
        """What the grammars of requests allow after their output and their drafts, by request id: bool [Q, V]."""
        asked = [(r.grammar, own) for r, own in zip(requests, drafts, strict=True) if r.grammar is not None]
        if not asked:
            return {}
        allowed_NQV = unpack(sent(allowed_rows(asked), self.device), self.target.cfg.vocab_size)
        return {r.id: rows for r, rows in zip(requests, allowed_NQV, strict=True)}

    def round(self, slots_B: Tensor, k: int) -> Tensor:
        verified = self.verify(slots_B, k)
        return self.draft(verified, *self.decide(verified))

    def verify(self, slots_B: Tensor, k: int) -> Verified:
        rows = round_inputs(self.state, slots_B, k, self.longest)
        pages = Pages(rows.tables_BM, rows.starts_B, rows.live_B, k + 1)
        attend = PagedAttend(self.cache, pages)
        hidden, taps = self.read(rows.tokens_BQ.flatten(), rows.positions_T, attend, self.taps)
        combined = self.drafter.combine(taps) if self.drafter is not None and taps is not None else None
        return Verified(slots_B, rows, self.target.logits(hidden), combined)

    def decide(self, v: Verified) -> tuple[Tensor, Tensor]:
        """How many drafts hold, and the tokens they and the target's own make."""
        return self._accept(v, self._choose(v.logits_TV, v.inputs))

    @staticmethod
    def _choose(logits_TV: Tensor, i: RoundInputs) -> Tensor:
        chosen = choose(logits_TV, i.temperature_T, i.top_k_T, i.top_p_T, i.min_p_T, i.seed_T, i.next_T)
        return chosen.view(i.tokens_BQ.shape)

    def _accept(self, v: Verified, chosen_BQ: Tensor) -> tuple[Tensor, Tensor]:
        i, rates, seeds, firsts = v.inputs, self.rates_K, v.inputs.seed_T, v.inputs.next_T
        if rates is not None:
            rows = chosen_BQ.shape[1]
            rates, seeds, firsts = rates[: rows - 1], seeds[::rows], firsts[::rows]
        return accept(i.tokens_BQ, chosen_BQ, i.available_B, rates, seeds, firsts)

    def decide_shaped(
        self,
        v: Verified,
        requests: list[Request],
        logprobs: dict[int, list[dict[int, float]]],
        allowed: dict[int, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """As `decide`, for a batch in which some requests shape their logits or want them back."""
        batch, rows = v.inputs.tokens_BQ.shape
        raw_BQV = v.logits_TV.view(batch, rows, -1)
        shaped_BQV = raw_BQV.to(torch.float32, copy=True)
        for b, r in enumerate(requests):
            if r.shaped:
                drafts_K = v.inputs.tokens_BQ[b, 1:]
                shaped_BQV[b] = shape_rows(
                    raw_BQV[b], r.params, r.prompt_ids, r.output_ids, drafts_K, r.barred, allowed.get(r.id)
                )
        accepted_B, emitted_BQ = self._accept(v, self._choose(shaped_BQV.flatten(0, 1), v.inputs))
        wanted = [(b, r) for b, r in enumerate(requests) if r.params.logprobs is not None]
        if wanted:
            counts, emitted = accepted_B.tolist(), emitted_BQ.tolist()
            for b, r in wanted:
                logprobs[r.id] = logprob_rows(raw_BQV[b], emitted[b][: counts[b] + 1], r.params.logprobs or 0)
        return accepted_B, emitted_BQ

    def draft(self, v: Verified, accepted_B: Tensor, emitted_BQ: Tensor) -> Tensor:
        """New drafts for each request, and the state of the slots moved on; the round's result."""
        k = v.inputs.tokens_BQ.shape[1] - 1
        drafts_BK = emitted_BQ[:, :0]
        if self.drafter is not None:
            drafts_BK = self._drafts(v, accepted_B, emitted_BQ, k)
        s = self.state
        commit_state(s.tokens_SN, s.start_S, s.available_S, v.slots_B, emitted_BQ, accepted_B, drafts_BK, self.longest)
        return torch.cat([emitted_BQ, accepted_B[:, None], v.inputs.available_B[:, None]], 1)

    def _drafts(self, v: Verified, accepted_B: Tensor, emitted_BQ: Tensor, k: int) -> Tensor:
        drafter, mask_id = self.drafter, self.drafter.cfg.mask_token_id if self.drafter is not None else None
        assert drafter is not None and v.hidden_TD is not None
        batch = len(emitted_BQ)
        limits_B = self.limits_S[:batch]
        starts_B, tables_BM = v.inputs.starts_B, v.inputs.tables_BM
        kept_BQ, hidden_TD = emitted_BQ, v.hidden_TD
        if batch == 1 and self.device.type == "cpu":  # where rows cost and asking how many hold does not
            held = int(accepted_B) + 1
            kept_BQ, hidden_TD = emitted_BQ[:, :held], hidden_TD[:held]
        rows = draft_inputs(kept_BQ, accepted_B, starts_B, hidden_TD, self.mask_hidden_D, mask_id, k, limits_B)
        pages = Pages(tables_BM, starts_B, rows.live_B, len(rows.token_ids_R) // batch)
        attend = PagedAttend(self.draft_cache, pages)
        silent = {"silent": True} if k == 0 and isinstance(self.guess, FlatDrafter) else {}
        said, handed_on = self.guess(rows.token_ids_R, rows.hidden_RD, rows.positions_R, attend, **silent)
        if k == 0:
            return emitted_BQ[:, :0]
        wanted = rows.sample_rows_BK.flatten()
        guesses = drafter.target_ids(argmax(drafter.logits(said[wanted])))
        if mask_id is not None:
            return guesses.view(batch, k)
        return self.one_by_one(guesses, handed_on[wanted], starts_B + accepted_B + 1, tables_BM, k)

    def one_by_one(self, guess_B: Tensor, hidden_BD: Tensor, position_B: Tensor, tables_BM: Tensor, k: int) -> Tensor:
        """EAGLE-3: each further guess from the last one and the drafter's own output; first row at `position`."""
        assert self.drafter is not None
        guesses = [guess_B]
        for i in range(k - 1):
            at_B = (position_B + i).clamp(max=self.longest - 1)
            live_B = (self.longest - position_B - i).clamp(0, 1)
            pages = Pages(tables_BM, at_B.int(), live_B.int(), 1)
            said, hidden_BD = self.guess(guesses[-1], hidden_BD, at_B, PagedAttend(self.draft_cache, pages))
            guesses.append(self.drafter.target_ids(argmax(self.drafter.logits(said))))
        return torch.stack(guesses, 1)

    # Prompts

    def _read(self, chunks: list[Chunk], logprobs: dict[int, list[dict[int, float]]]) -> Tensor | None:
        """Reads chunks; for those that end their prompt the first token, drafts, and the slot's state."""
        tokens = [t for c in chunks for t in c.request.tokens[c.begin : c.end]]
        positions = [p for c in chunks for p in range(c.begin, c.end)]
        slots_B = self._to_device([c.request.slot for c in chunks])
        counts = [c.end - c.begin for c in chunks]
        inputs = (self._to_device(tokens), None, self._to_device(positions))
        hidden, taps = self._over(self.read_target, self.target_chunks, inputs, chunks, counts, slots_B)

        ends, at = {}, 0  # of each chunk, its last row
        for c in chunks:
            at += c.end - c.begin
            ends[c.request.id] = at - 1
        fresh = [c for c in chunks if c.final and not c.request.output_ids]
        first_tokens = None
        if fresh:
            logits = self.target.logits(hidden[self._to_device([ends[c.request.id] for c in fresh])])
            first_tokens = self._first_tokens(fresh, logits, logprobs)
        final = [c for c in chunks if c.final]
        newest_F = self._newest(final, fresh, first_tokens)
        drafts_FK = None
        if self.drafter is not None and taps is not None:
            drafts_FK = self._draft_after(chunks, final, newest_F, self.drafter.combine(taps), slots_B)
        if final:
            self._begin(final, newest_F, drafts_FK)
        return first_tokens

    def read_target(self, tokens: Tensor, _: Tensor | None, positions: Tensor, pages: Pages) -> Passed:
        return self.read(tokens, positions, PagedAttend(self.cache, pages, prefill_attention), self.taps)

    def read_drafter(self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, pages: Pages) -> Passed:
        assert self.drafter is not None and hidden is not None
        return self.guess(tokens, hidden, positions, PagedAttend(self.draft_cache, pages, prefill_attention))

    def _over(
        self,
        run: Pass,
        graphs: ChunkGraphs | None,
        inputs: tuple[Tensor, Tensor | None, Tensor],
        chunks: list[Chunk],
        counts: list[int],
        slots_B: Tensor,
    ) -> Passed:
        """A pass over `counts` rows of each chunk: a recorded one where there is one of that size."""
        begins = [c.begin for c in chunks]
        live = [min(count, self.longest - begin) for count, begin in zip(counts, begins, strict=True)]
        tables_BM = self.state.block_tables_SM[slots_B]
        recorded = graphs.find(counts) if graphs is not None else None
        if recorded is not None:
            meta = ChunkGraphs.meta(recorded, begins, live, counts)
            return recorded.replay(*inputs, tables_BM, self._to_device(meta, torch.int32))
        first = [0]
        for count in counts:
            first.append(first[-1] + count)
        meta_3B = self._to_device([begins + [0], live + [0], first], torch.int32)
        pages = Pages(tables_BM, meta_3B[0, :-1], meta_3B[1, :-1], max(counts), meta_3B[2], max_context=max(begins))
        return run(*inputs, pages)

    def _first_tokens(
        self, fresh: list[Chunk], logits_FV: Tensor, logprobs: dict[int, list[dict[int, float]]]
    ) -> Tensor:
        shaped = logits_FV
        if any(c.request.shaped for c in fresh):
            shaped = logits_FV.float().clone()
            none = torch.empty(0, dtype=torch.long, device=self.device)
            bound = [c.request for c in fresh if c.request.grammar is not None]
            allowed = self._allowed(bound, [[] for _ in bound])
            for f, c in enumerate(fresh):
                r = c.request
                if r.shaped:
                    row, rules = logits_FV[f : f + 1], allowed.get(r.id)
                    shaped[f] = shape_rows(row, r.params, r.prompt_ids, [], none, r.barred, rules)[0]
        slots, s = self._to_device([c.request.slot for c in fresh]), self.state
        settings = (s.temperature_S[slots], s.top_k_S[slots], s.top_p_S[slots], s.min_p_S[slots], s.seed_S[slots])
        tokens = choose(shaped, *settings, self._to_device([c.end for c in fresh]))
        wanted = [(f, c.request) for f, c in enumerate(fresh) if c.request.params.logprobs is not None]
        if wanted:
            said = tokens.tolist()
            for f, r in wanted:
                logprobs[r.id] = logprob_rows(logits_FV[f : f + 1], [said[f]], r.params.logprobs or 0)
        return tokens

    def _newest(self, final: list[Chunk], fresh: list[Chunk], first_tokens: Tensor | None) -> Tensor:
        """The token after each finished prompt: just chosen, or known from before it was preempted."""
        known_F = self._to_device([(c.request.output_ids or [0])[-1] for c in final])
        if first_tokens is not None:
            ids = [c.request.id for c in fresh]
            known_F[self._to_device([i for i, c in enumerate(final) if c.request.id in ids])] = first_tokens
        return known_F

    def _draft_after(
        self, chunks: list[Chunk], final: list[Chunk], newest_F: Tensor, hidden_TD: Tensor, slots_B: Tensor
    ) -> Tensor | None:
        """The drafter reads the chunks, mask rows behind those that end; drafts for these."""
        assert self.drafter is not None
        k, mask_id = self.most_drafts, self.drafter.cfg.mask_token_id
        behind = max(k - 1, 0) if mask_id is not None else 0
        tokens: list[int] = []
        positions: list[int] = []
        source: list[int] = []  # row of hidden_TD; one past its end is the mask's
        counts: list[int] = []
        unknown: list[int] = []  # rows whose token is the newest
        read = 0
        for c in chunks:
            rows, masks = c.end - c.begin, behind if c.final else 0
            following = c.request.tokens[c.begin + 1 : c.end + 1]
            if c.final:
                unknown.append(len(tokens) + rows - 1)
                following = [*following[: rows - 1], 0]
            tokens += following + [mask_id or 0] * masks
            positions += [min(p, self.longest - 1) for p in range(c.begin, c.end + masks)]
            source += [*range(read, read + rows), *[len(hidden_TD)] * masks]
            counts.append(rows + masks)
            read += rows
        token_ids, unknown_F = self._to_device(tokens), self._to_device(unknown)
        token_ids[unknown_F] = newest_F
        hidden_RD = hidden_TD
        if behind and final:
            assert self.mask_hidden_D is not None
            hidden_RD = torch.cat([hidden_TD, self.mask_hidden_D[None]])[self._to_device(source)]
        inputs = (token_ids, hidden_RD, self._to_device(positions))
        said, handed_on = self._over(self.read_drafter, self.drafter_chunks, inputs, chunks, counts, slots_B)
        if not final or k == 0:
            return None
        assert handed_on is not None
        if mask_id is not None:
            wanted = (unknown_F[:, None] + torch.arange(k, device=self.device)).flatten()
            return self.drafter.target_ids(argmax(self.drafter.logits(said[wanted]))).view(-1, k)
        guess = self.drafter.target_ids(argmax(self.drafter.logits(said[unknown_F])))
        tables_FM = self.state.block_tables_SM[self._to_device([c.request.slot for c in final])]
        ends_F = self._to_device([c.end for c in final])
        recorded = self.first_guesses.find(len(final)) if self.first_guesses is not None else None
        if recorded is not None:
            return recorded.replay(guess, handed_on[unknown_F], ends_F, tables_FM)
        return self.one_by_one(guess, handed_on[unknown_F], ends_F, tables_FM, k)

    def _begin(self, final: list[Chunk], newest_F: Tensor, drafts_FK: Tensor | None) -> None:
        s, k = self.state, 0 if drafts_FK is None else drafts_FK.shape[1]
        rows = [(c.request.slot, c.end, max(min(k, self.longest - c.end - 2), 0)) for c in final]
        meta = self._to_device(rows)
        slots = meta[:, 0]
        s.tokens_SN[slots, 0] = newest_F
        if drafts_FK is not None:
            s.tokens_SN[slots, 1 : k + 1] = drafts_FK
        s.start_S[slots], s.available_S[slots] = meta[:, 1], meta[:, 2]
