"""Attention over pages and the rotation before it, against plain dense code in fp64.

The Triton kernels run twice: here in Triton's interpreter, in a child process because the interpreter is chosen by an
environment variable that is read when the kernels are imported; and compiled, under the marker `gpu`.
"""

import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_interpreter import patch_interpreter, run_in_interpreter

from peagle.config import ChunkedAttention, Window
from peagle.kernels.attention.paged import (
    PagedAttentionMetadata,
    paged_attention,
    paged_attention_torch,
    prefill_attention,
)
from peagle.kernels.attention.rotary import QKNormRope, split_qkv_rope, split_qkv_rope_torch

BLOCK = 16


@dataclass
class Case:
    """One call on random data."""

    group: int
    kv_heads: int
    width: int
    starts: list[int]
    rows: list[int]
    live: list[int]
    window: Window
    scattered: bool
    merged: bool
    seed: int
    sunk: bool = False  # heads have sinks

    def build(self, dtype: torch.dtype, device: str) -> None:
        gen = torch.Generator().manual_seed(self.seed)
        batch, heads = len(self.starts), self.group * self.kv_heads
        per = max((s + n) // BLOCK + 1 for s, n in zip(self.starts, self.live, strict=True))
        blocks = batch * per + 3
        order = torch.randperm(blocks, generator=gen) if self.scattered else torch.arange(blocks)
        tables = order[: batch * per].view(batch, per).int()
        for b in range(batch):  # what lies past the last used block must not matter
            tables[b, -(-(self.starts[b] + self.live[b]) // BLOCK) :] = -12345
        self.tables = tables
        self.offsets = [sum(self.rows[:b]) for b in range(batch + 1)]
        shape = (blocks, BLOCK, self.kv_heads, self.width)
        cache = torch.randn(2, *shape, generator=gen)
        cache_k, cache_v = cache[0], cache[1]
        for b in range(batch):  # nor what the cache holds from `start` on
            for p in range(self.starts[b], self.starts[b] + self.live[b]):
                cache[:, tables[b, p // BLOCK], p % BLOCK] = float("nan")
        self.cache_k, self.cache_v = (x.to(dtype).to(device) for x in (cache_k, cache_v))
        qkv = torch.randn(self.offsets[-1], heads + 2 * self.kv_heads, self.width, generator=gen)
        for b in range(batch):  # nor padding
            qkv[self.offsets[b] + self.live[b] : self.offsets[b + 1], heads:] = float("nan")
        qkv = qkv.to(dtype).to(device)
        parts = qkv.split([heads, self.kv_heads, self.kv_heads], 1)
        self.q, self.k, self.v = parts if self.merged else tuple(x.clone() for x in parts)
        self.sinks = (2 * torch.randn(heads, generator=gen)).to(dtype).to(device) if self.sunk else None

    def pages(self, device: str, max_context: int | None = None) -> PagedAttentionMetadata:
        same = len(set(self.rows)) == 1
        ints = {"dtype": torch.int32, "device": device}
        return PagedAttentionMetadata(
            self.tables.to(device),
            torch.tensor(self.starts, **ints),
            torch.tensor(self.live, **ints),
            max(self.rows),
            None if same else torch.tensor(self.offsets, **ints),
            max_context,
        )

    def rotation(self, norm: bool, dtype: torch.dtype, device: str) -> QKNormRope:
        (_, cos, sin), weights = rotary_inputs(self.width, 1, 1, self.offsets[-1], norm, dtype, device)
        return QKNormRope(cos, sin, *weights, 1e-6)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output (nan where it means nothing) and both caches, key by key."""
        q, k, v = (x.cpu().double() for x in (self.q, self.k, self.v))
        cache_k, cache_v = self.cache_k.cpu().clone(), self.cache_v.cpu().clone()
        out = torch.full(q.shape, float("nan"), dtype=torch.float64)
        for b, start in enumerate(self.starts):
            if not self.live[b]:
                continue  # an empty place of a batch: its start and its table mean nothing
            first, end = self.offsets[b], start + self.live[b]
            where = [(int(self.tables[b, p // BLOCK]), p % BLOCK) for p in range(end)]
            for j in range(self.live[b]):
                cache_k[where[start + j]] = self.k[first + j].cpu()
                cache_v[where[start + j]] = self.v[first + j].cpu()
            keys = torch.stack([cache_k[at] for at in where]).double()
            values = torch.stack([cache_v[at] for at in where]).double()
            for j in range(self.live[b]):
                if isinstance(self.window, ChunkedAttention):
                    low = start + j - (start + j) % self.window.chunk_size
                else:
                    low = 0 if self.window is None else max(0, start + j - self.window + 1)
                for h in range(q.shape[1]):
                    g = h // self.group
                    weights = torch.exp(keys[low : start + j + 1, g] @ q[first + j, h] * self.width**-0.5)
                    lost = 0.0 if self.sinks is None else self.sinks[h].double().exp().cpu()
                    out[first + j, h] = weights @ values[low : start + j + 1, g] / (weights.sum() + lost)
        return out, cache_k, cache_v

    def check(self, run, tolerance: float, rotation: QKNormRope | None = None) -> None:
        """`rotation`: `run` turns q and k by it."""
        q, k = self.q, self.k
        if rotation is not None:
            self.q, self.k = rotation.apply(q, k)
        want, want_k, want_v = self.expected()
        out = run(q, k, self.v, self.cache_k, self.cache_v).cpu().double()
        # A norm is a sum, whose order may differ; all else that is written must be written to the bit.
        step = 2 * tolerance if rotation is not None and rotation.has_norm else 0.0
        torch.testing.assert_close(self.cache_k.cpu(), want_k, rtol=step, atol=step, equal_nan=True)
        torch.testing.assert_close(self.cache_v.cpu(), want_v, rtol=0, atol=0, equal_nan=True)
        real = ~want.isnan()
        torch.testing.assert_close(out[real], want[real], rtol=tolerance, atol=tolerance)


SMALL = [(group, kv_heads, 8) for group in (1, 2, 3, 4) for kv_heads in (1, 2, 3)] + [(3, 3, 32), (4, 1, 32)]
TILED = [(1, 3, 16), (2, 1, 16), (3, 3, 16), (4, 2, 16), (3, 1, 32)]
COMPILED = [(3, 3, 64), (4, 2, 128)]  # few: each is compiled several times


@st.composite
def cases(
    draw: st.DrawFn, same_rows: bool, most_rows: int, most_context: int, shapes: list[tuple[int, int, int]]
) -> Case:
    """`shapes`: heads per key/value head, key/value heads, width."""
    batch = draw(st.integers(1, 3 if same_rows else 5))
    group, kv_heads, width = draw(st.sampled_from(shapes))
    # Around the ends of blocks, of key tiles and of shares, and nothing at all.
    edge = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193])
    context = st.one_of(edge, st.integers(0, most_context)).map(lambda n: min(n, most_context))
    rows = [draw(st.integers(1, most_rows))] * batch
    if not same_rows:  # some have none
        rows = [draw(st.one_of(st.just(0), st.integers(1, most_rows), st.integers(1, most_rows))) for _ in rows]
        rows = rows if any(rows) else [1] * batch
    live = [draw(st.one_of(st.just(n), st.integers(0, n))) for n in rows]
    return Case(
        group=group,
        kv_heads=kv_heads,
        width=width,
        starts=[draw(context) for _ in range(batch)],
        rows=rows,
        live=live,
        window=draw(
            st.one_of(st.none(), st.sampled_from([1, 7, 16, 40, 100, ChunkedAttention(16), ChunkedAttention(27)]))
        ),
        scattered=draw(st.booleans()),
        merged=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        sunk=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(case=cases(same_rows=True, most_rows=20, most_context=90, shapes=SMALL))
def test_torch_paged(case: Case) -> None:
    case.build(torch.float32, "cpu")
    pages = case.pages("cpu")
    case.check(lambda *args: paged_attention(*args, pages, case.window, sinks=case.sinks), 1e-5)


@settings(max_examples=30, deadline=None)
@given(case=cases(same_rows=False, most_rows=100, most_context=70, shapes=SMALL))
def test_torch_prefill(case: Case) -> None:
    case.build(torch.float32, "cpu")
    pages = case.pages("cpu")
    case.check(lambda *args: prefill_attention(*args, pages, case.window, sinks=case.sinks), 1e-5)


def test_layers_share_the_pages() -> None:
    """A second layer with another window must not see what the first one prepared."""
    case = Case(2, 2, 8, [20, 3], [4, 4], [4, 3], None, True, True, 0)
    case.build(torch.float32, "cpu")
    pages = case.pages("cpu")
    for window in (None, 5, None, ChunkedAttention(5), 5):
        case.window = window
        case.build(torch.float32, "cpu")
        case.check(lambda *args, window=window: paged_attention(*args, pages, window), 1e-5)


def test_untouched_rows_are_not_nan() -> None:
    case = Case(2, 1, 8, [5, 0], [3, 3], [1, 0], None, False, True, 0)
    case.build(torch.float32, "cpu")
    out = paged_attention(case.q, case.k, case.v, case.cache_k, case.cache_v, case.pages("cpu"), None)
    assert not out.isnan().any()


def triton_paged(
    case: Case,
    dtype: torch.dtype,
    device: str,
    tile: int,
    splits: int,
    queries: int,
    turn: str = "",
    ahead: int = 0,
    warps: int = 4,
    programs: int = 0,
    span: int = 1,
) -> None:
    """`turn`: "" (q and k come rotated), "plain" or "norm"."""
    from peagle.kernels.attention.paged_launch import PagedLaunchConfig
    from peagle.kernels.attention.paged_triton import paged_attention_triton

    case.build(dtype, device)
    pages = case.pages(device)
    launch = PagedLaunchConfig(
        tile, queries, splits, warps, 2 if dtype == torch.float32 else 3, ahead, programs, 0, span
    )
    rotation = case.rotation(turn == "norm", dtype, device) if turn else None
    more = {"launch": launch, "rope": rotation, "sinks": case.sinks}
    case.check(lambda *args: paged_attention_triton(*args, pages, case.window, **more), tolerance(dtype), rotation)


def triton_bits(case: Case, dtype: torch.dtype, device: str, launches: list, turn: str = "") -> None:
    """All rows at once by each of the launches (None: the usual one); each request alone; each row alone.

    Wherever a row is computed, and with whomever, its bits are the same.
    """
    from peagle.kernels.attention.paged_triton import paged_attention_triton

    case.build(dtype, device)
    rotation = case.rotation(turn == "norm", dtype, device) if turn else None
    batch, most = len(case.starts), max(case.rows)
    caches = [case.cache_k.clone(), case.cache_v.clone()]
    pages = case.pages(device)

    def run(at: Tensor, some: PagedAttentionMetadata, launch) -> Tensor:
        turned = (
            QKNormRope(rotation.cos[at], rotation.sin[at], rotation.q_norm, rotation.k_norm, 1e-6) if turn else None
        )
        args = (case.q[at], case.k[at], case.v[at], *caches, some, case.window)
        return paged_attention_triton(*args, launch=launch, rope=turned, sinks=case.sinks)

    every = torch.arange(batch * most, device=device)
    outs = [run(every, pages, launch) for launch in launches]
    live = [b * most + j for b in range(batch) for j in range(case.live[b])]
    for out in outs[1:]:
        assert torch.equal(out[live], outs[0][live])
    written = [x.clone() for x in caches]
    for b, count in enumerate(case.live):
        if not count:
            continue
        own = PagedAttentionMetadata(
            pages.block_tables_BM[b : b + 1],
            pages.num_computed_tokens_B[b : b + 1],
            pages.query_lens_B[b : b + 1],
            most,
        )
        at = every[b * most : (b + 1) * most]
        assert torch.equal(run(at, own, launches[0])[:count], outs[0][at[:count]]), "a request alone"
        for j in {0, count // 2, count - 1}:
            one = PagedAttentionMetadata(
                own.block_tables_BM, own.num_computed_tokens_B + j, torch.ones_like(own.query_lens_B), 1
            )
            assert torch.equal(run(at[j : j + 1], one, launches[-1])[0], outs[0][at[j]]), "a row alone"
    for cache, before in zip(caches, written, strict=True):
        torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


def triton_prefill(case: Case, dtype: torch.dtype, device: str, rows: int, tile: int) -> None:
    from peagle.kernels.attention.prefill_triton import PrefillLaunchConfig, prefill_attention_triton

    case.build(dtype, device)
    pages = case.pages(device, 0 if not any(case.starts) else None)
    launch = PrefillLaunchConfig(rows, tile, 4, 2)
    more = {"launch": launch, "sinks": case.sinks}
    case.check(lambda *args: prefill_attention_triton(*args, pages, case.window, **more), tolerance(dtype))


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


def triton_rotary(
    width: int, heads: int, kv_heads: int, rows: int, norm: bool, dtype: torch.dtype, device: str
) -> None:
    from peagle.kernels.attention.rotary_triton import split_qkv_rope_triton

    args, weights = rotary_inputs(width, heads, kv_heads, rows, norm, dtype, device)
    want = split_qkv_rope_torch(*args, heads, kv_heads, *weights, 1e-6)
    have = split_qkv_rope_triton(args[0].clone(), *args[1:], heads, kv_heads, *weights, 1e-6)
    for a, b in zip(have, want, strict=True):
        # Without a norm there is no sum whose order could differ.
        step = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(a, b, rtol=step if norm else 0, atol=step if norm else 0)


def rotary_inputs(width, heads, kv_heads, rows, norm, dtype, device):
    gen = torch.Generator().manual_seed(width + rows)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * width, generator=gen).to(dtype).to(device)
    angles = torch.randint(0, 5000, (rows, 1), generator=gen).float() * 10.0 ** -torch.linspace(0, 4, width // 2)
    angles = torch.cat([angles, angles], -1)[:, None, :]
    cos, sin = (x.to(dtype).to(device) for x in (angles.cos(), angles.sin()))
    weights = [torch.randn(width, generator=gen).to(dtype).to(device) if norm else None for _ in range(2)]
    return (qkv, cos, sin), weights


@pytest.mark.parametrize("norm", [False, True])
def test_split_rotate_turns_pairs(norm: bool) -> None:
    """Entries i and i + d/2 of a head are one complex number, turned by the angle."""
    heads, kv_heads, width = 6, 2, 16
    (qkv, cos, sin), weights = rotary_inputs(width, heads, kv_heads, 5, norm, torch.float64, "cpu")
    parts = qkv.clone().view(5, -1, width).split([heads, kv_heads, kv_heads], 1)
    have = split_qkv_rope(qkv, cos, sin, heads, kv_heads, *weights, 1e-6)
    turn = torch.complex(cos, sin)[..., : width // 2]
    for x, rotated, weight in zip(parts[:2], have[:2], weights, strict=True):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        want = torch.complex(*x.chunk(2, -1)) * turn
        torch.testing.assert_close(rotated, torch.cat([want.real, want.imag], -1))
    assert torch.equal(have[2], parts[2])


ROTARY = [(128, 32, 8, 1, False), (64, 9, 3, 5, False), (32, 4, 4, 3, True), (128, 16, 8, 2, True)]


def test_triton_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def check_in_the_interpreter() -> None:
    from peagle.kernels.attention.paged_launch import PagedLaunchConfig
    from peagle.kernels.attention.paged_triton import paged_attention_triton
    from peagle.kernels.attention.prefill_triton import prefill_attention_triton

    patch_interpreter()
    # A kernel takes a second or so here: no shrinking, which would take minutes.
    phases = (Phase.explicit, Phase.generate)
    same = settings(max_examples=20, deadline=None, derandomize=True, database=None, phases=phases)
    exact = {"dtype": torch.float32, "device": "cpu"}

    @same
    @given(
        case=cases(same_rows=True, most_rows=10, most_context=200, shapes=TILED),
        tile=st.sampled_from([16, 32, 64]),
        splits=st.sampled_from([1, 2, 3, 5]),
        queries=st.sampled_from([16, 32]),
        turn=st.sampled_from(["", "plain", "norm"]),
        programs=st.sampled_from([0, 1, 2, 3]),
        span=st.sampled_from([1, 2]),
    )
    def paged(case: Case, tile: int, splits: int, queries: int, turn: str, programs: int, span: int) -> None:
        launch = {"tile": tile, "splits": splits, "queries": queries, "programs": programs, "span": span}
        triton_paged(case, turn=turn, **launch, **exact)

    @settings(same, max_examples=6)
    @given(
        case=cases(same_rows=True, most_rows=5, most_context=200, shapes=TILED),
        splits=st.sampled_from([2, 3, 5]),
        turn=st.sampled_from(["", "norm"]),
        span=st.sampled_from([1, 2]),
    )
    def bits(case: Case, splits: int, turn: str, span: int) -> None:
        # numpy's products are held to the bit for one width alone, so all have 16 queries at a time
        launches = [PagedLaunchConfig(16, 16, splits, 4, 2, 0, programs, 0, span) for programs in (1, 2, 0)]
        triton_bits(case, launches=launches, turn=turn, **exact)

    @same
    @given(
        case=cases(same_rows=False, most_rows=70, most_context=70, shapes=TILED),
        shape=st.sampled_from([(16, 16), (32, 16), (64, 32)]),
    )
    def prefill(case: Case, shape: tuple[int, int]) -> None:
        triton_prefill(case, rows=shape[0], tile=shape[1], **exact)

    paged()
    bits()
    prefill()
    half = Case(3, 3, 32, [70, 0, 33], [4, 4, 4], [4, 2, 0], None, True, True, 1)
    triton_paged(half, torch.float16, "cpu", 32, 2, 16, "plain")
    wide = Case(8, 1, 512, [70], [3], [3], ChunkedAttention(32), True, True, 2)
    for attend in (paged_attention_triton, prefill_attention_triton):
        wide.build(torch.float32, "cpu")
        pages = wide.pages("cpu")
        wide.check(lambda *args, attend=attend, pages=pages: attend(*args, pages, wide.window), 1e-5)
    for shape in ROTARY:
        triton_rotary(*shape, torch.float32, "cpu")
    print("kernels checked")


@pytest.mark.gpu
@settings(max_examples=30, deadline=None)
@given(
    case=cases(same_rows=True, most_rows=20, most_context=900, shapes=COMPILED),
    splits=st.sampled_from([1, 3, 16]),
    turn=st.sampled_from(["", "plain"]),
    programs=st.sampled_from([0, 1, 2]),
)
def test_triton_paged_on_the_gpu(case: Case, splits: int, turn: str, programs: int) -> None:
    """Launches of `choose_paged_launch`, but with query tiles narrow enough to need several."""
    tile, queries, ahead, span = (256, 16, 1, 2) if case.group == 3 else (128, 32, 2, 1)
    triton_paged(case, torch.bfloat16, "cuda", tile, splits, queries, turn, ahead, 8, programs, span)


@pytest.mark.gpu
@settings(max_examples=8, deadline=None)
@given(case=cases(same_rows=True, most_rows=9, most_context=300, shapes=COMPILED[1:]))
def test_triton_paged_norms_on_the_gpu(case: Case) -> None:
    triton_paged(case, torch.bfloat16, "cuda", 128, 3, 32, "norm", 2, 8)


@pytest.mark.gpu
@settings(max_examples=10, deadline=None)
@given(
    case=cases(same_rows=True, most_rows=9, most_context=300, shapes=COMPILED[:1]),
    splits=st.sampled_from([1, 3]),
    turn=st.sampled_from(["", "plain"]),
)
def test_triton_paged_exactly_on_the_gpu(case: Case, splits: int, turn: str) -> None:
    triton_paged(case, torch.float32, "cuda", 32, splits, 32, turn)


@pytest.mark.gpu
@settings(max_examples=10, deadline=None)
@given(case=cases(same_rows=True, most_rows=9, most_context=300, shapes=[(4, 1, 256), (8, 8, 64), (8, 1, 512)]))
def test_wide_heads_and_many_by_the_usual_launch_on_the_gpu(case: Case) -> None:
    for attend in (paged_attention, prefill_attention):
        case.build(torch.bfloat16, "cuda")
        pages = case.pages("cuda")
        run = lambda *args, attend=attend, pages=pages: attend(*args, pages, case.window, sinks=case.sinks)  # noqa: E731
        case.check(run, 2e-2)


def test_programs_have_all_tiles_between_them_a_share_at_a_time() -> None:
    """The example in the kernels' docstring, then others, by the functions that the kernel is made of."""
    from peagle.kernels.attention import paged_triton as kernels

    tiles_of, tile_after, owner = (f.fn for f in (kernels._count_segments, kernels._next_segment, kernels._owner))

    def order(program: int, low: int, tiles: int, splits: int, programs: int) -> list[int]:
        how = (low, tiles, splits, programs, programs == splits)
        tile, place, found = low + program, program, []
        for _ in range(tiles_of(program, *how)):
            assert owner(tile, low, splits, programs, programs == splits) == program
            found.append(tile)
            tile, place = tile_after(tile, place, *how)
        return found

    assert [order(p, 0, 7, 3, 2) for p in range(2)] == [[0, 3, 6, 2, 5], [1, 4]]
    for low, tiles, splits, programs in ((0, 9, 4, 3), (3, 11, 5, 2), (2, 16, 4, 4), (0, 3, 8, 2), (5, 12, 3, 1)):
        used = min(programs, tiles - low)  # the others return before they ask
        orders = [order(p, low, tiles, splits, programs) for p in range(used)]
        assert sorted(sum(orders, [])) == list(range(low, tiles))
        for one in orders:  # each share from its first tile to its last, none taken up again
            firsts = [tile for tile in one if tile < low + splits]
            assert one == [tile for first in firsts for tile in range(first, tiles, splits)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (32, 8, 128), (64, 8, 64), (4, 2, 32), (4, 1, 256), (32, 4, 512)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_decides_the_bits_depends_on_no_batch_but_a_large_one(heads, kv_heads, width, dtype) -> None:
    from peagle.kernels.attention.paged_launch import choose_paged_launch, get_short_context_limits
    from peagle.kernels.gemm.tile_configs import MAX_FEW_ROWS, is_small_shape

    def decisive(batch: int, rows: int, blocks: int, max_context: int | None = None) -> tuple[int, ...]:
        ints = torch.zeros(batch, dtype=torch.int32)
        pages = PagedAttentionMetadata(
            torch.zeros(batch, blocks, dtype=torch.int32), ints, ints, rows, None, max_context
        )
        launch = choose_paged_launch(pages, heads, kv_heads, width, BLOCK, dtype, torch.device("cpu"))
        assert 1 <= launch.programs <= launch.splits and launch.tile >= (64 if dtype == torch.bfloat16 else 32)
        return launch.tile, launch.splits, launch.warps, launch.segment_tiles

    near = get_short_context_limits(heads, kv_heads, width, dtype, torch.device("cpu"))
    last = 132 // kv_heads  # an H200's processors
    sizes = [(b, rows) for b in (1, 2, 3, 4, 8, last) for rows in (1, 3, 8, 40)]
    small = is_small_shape((heads + 2 * kv_heads) * width, heads * width)
    held = [
        (b, rows) for b, rows in sizes if small or dtype == torch.float32 or width > 256 or b * rows <= MAX_FEW_ROWS
    ]
    few = {decisive(b, rows, m) for b, rows in held for m in (1, 7, 128, 2048)}
    assert few | {decisive(2, 8, 128, 0), decisive(2, 8, 128, 900)} == few and len(few) == 1
    assert all((tile, tile * span) == (near or (tile, tile)) for tile, _, _, span in few)
    assert bool(near) == ((heads, kv_heads, width) in {(9, 3, 64), (4, 2, 32)} and dtype == torch.bfloat16)
    assert not few & {(32, 1, 4, 1)} or kv_heads > 132
    for b, rows in set(sizes) - set(held):  # products round otherwise there: one share a program, nothing left behind
        tile, splits, warps, span = decisive(b, rows, 2048)
        [(usual, most, threads, one)] = few
        assert (tile, warps, span) == (usual, threads, one) and splits <= most
        assert splits <= max(1, (2 if width < 128 else 1) * 132 // (b * kv_heads))


def test_a_gpu_with_little_shared_memory_has_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.kernels.attention import paged_launch as paged_launches

    ints = torch.zeros(1, dtype=torch.int32)
    pages = PagedAttentionMetadata(torch.zeros(1, 128, dtype=torch.int32), ints, ints, 8)

    def launch() -> paged_launches.PagedLaunchConfig:
        return paged_launches.choose_paged_launch(pages, 9, 3, 64, BLOCK, torch.bfloat16, torch.device("cpu"))

    usual = launch()
    assert (usual.tile, usual.segment_tiles, usual.programs) == (256, 2, 4)  # of 2,048 positions
    monkeypatch.setattr(paged_launches, "get_shared_memory", lambda device: 163 << 10)  # an A100's
    assert paged_launches.get_short_context_limits(9, 3, 64, torch.bfloat16, torch.device("cpu")) == ()
    small = launch()
    assert (small.tile, small.segment_tiles, small.programs) == (64, 1, 32)
    assert small.stages * 2 * small.tile * 64 * 2 < 99 << 10


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 1, 512), (9, 3, 64), (32, 8, 128)])
def test_no_two_kinds_of_operand_have_one_address(heads: int, kv_heads: int, width: int, once: bool, rows: int) -> None:
    """The assembler of CUDA 12.8 loses the address of a product's operand in shared memory that it has in one register
    with another kind of operand's: an illegal access. The interpreter computes what was meant; this reads the PTX.
    Seen with heads of 512, and with heads of 64 if nothing is loaded ahead (one stage)."""
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from peagle.kernels.attention.paged_launch import choose_paged_launch
    from peagle.kernels.attention.paged_triton import _NEW_ROWS, _paged_kernel

    ints = torch.zeros(1, dtype=torch.int32)
    pages = PagedAttentionMetadata(torch.zeros(1, 24, dtype=torch.int32), ints, ints, rows)
    launch = choose_paged_launch(pages, heads, kv_heads, width, BLOCK, torch.bfloat16, torch.device("cpu"))
    fixed = {"G": kv_heads, "GROUP": heads // kv_heads, "D": width, "BLOCK": BLOCK, "NEW_ROWS": _NEW_ROWS}
    fixed |= {
        "TILE": launch.tile,
        "SEGMENT_TILES": launch.segment_tiles,
        "QUERIES": launch.queries,
        "PREFETCH": launch.prefetch,
        "ONE_SEGMENT": once,
    }
    fixed |= {"ONE_SPLIT": True, "PRECISION": "tf32", "WINDOW_KIND": 0}
    fixed |= dict.fromkeys(("ROPE", "QK_NORM", "SINKS", "PDL"), False)
    names = _paged_kernel.arg_names
    types = dict.fromkeys(names[: names.index("partial_out")], "*bf16") | dict.fromkeys(
        ("partial_out", "partial_stats"), "*fp32"
    )
    types |= dict.fromkeys(("block_tables", "num_computed_tokens", "query_lens"), "*i32") | dict.fromkeys(
        ("scale", "eps"), "fp32"
    )
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    plain = ("rows", "splits", "window", "table_stride", "table_width", "scale", "eps", *fixed)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in plain}
    source = ASTSource(_paged_kernel, signature, fixed, aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    kinds: dict[str, set[int]] = {}  # by address register: the upper halves of the descriptors made with it
    for register, constant in re.findall(r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d{12,});", ptx):
        kinds.setdefault(register, set()).add(int(constant) >> 32)
    assert "wgmma.mma_async" in ptx and len(kinds) >= 3
    waits = [int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)]
    several = launch.segment_tiles > 1 or not once
    assert (max(waits, default=0) > 0) == (several and launch.stages > 2), "with several tiles the next is on its way"
    assert all(len(found) == 1 for found in kinds.values()), kinds


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "turn"),
    [
        (COMPILED[0], torch.bfloat16, "plain"),
        (COMPILED[1], torch.bfloat16, ""),
        ((4, 2, 128), torch.bfloat16, "norm"),
        (COMPILED[0], torch.float32, "plain"),
    ],
)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("rows", [8, 13])
def test_bits_do_not_depend_on_the_company(rows, window, shape, dtype, turn) -> None:
    """By the usual launch: 8 requests of differing lengths, around the ends of tiles and beyond all shares, against
    each alone and each row alone, which have other numbers of programs, other query tiles and one share fewer."""
    starts = [0, 5, 60, 127, 250, 1023, 3000, 6000]
    case = Case(*shape, starts, [rows] * 8, [rows] * 7 + [3], window, True, True, 0)
    triton_bits(case, dtype, "cuda", [None], turn)


@pytest.mark.gpu
@settings(max_examples=20, deadline=None)
@given(case=cases(same_rows=False, most_rows=300, most_context=300, shapes=COMPILED))
def test_triton_prefill_on_the_gpu(case: Case) -> None:
    triton_prefill(case, torch.bfloat16, "cuda", 128 if case.group == 3 else 64, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", ROTARY)
def test_triton_rotary_on_the_gpu(shape: tuple[int, int, int, int, bool], dtype: torch.dtype) -> None:
    triton_rotary(*shape, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [[4, 4, 4], [40, 1, 200]])
@pytest.mark.parametrize("starts", [[0, 0, 0], [0, 100, 37]])
def test_dispatch_on_the_gpu(rows: list[int], starts: list[int], dtype: torch.dtype) -> None:
    case = Case(4, 2, 64, starts, rows, rows, None, True, True, 0)
    case.build(dtype, "cuda")
    pages = case.pages("cuda", max(starts))
    attend = paged_attention if len(set(rows)) == 1 else prefill_attention
    case.check(lambda *args: attend(*args, pages, None), tolerance(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[1024], [130, 7], [300, 20]])
def test_prompts_on_the_gpu(rows: list[int]) -> None:
    """Nothing cached: each of these takes another way."""
    case = Case(2, 2, 128, [0] * len(rows), rows, rows, None, True, True, 0)
    case.build(torch.bfloat16, "cuda")
    pages = case.pages("cuda", 0)
    exact = [x.float() for x in (case.q, case.k, case.v, case.cache_k, case.cache_v)]
    want = paged_attention_torch(*exact, pages, None)
    have = prefill_attention(case.q, case.k, case.v, case.cache_k, case.cache_v, pages, None)
    torch.testing.assert_close(have.float(), want, rtol=2e-2, atol=2e-2)
    for cache, wanted in zip((case.cache_k, case.cache_v), exact[3:], strict=True):
        torch.testing.assert_close(cache.float(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_launch_follows_the_lengths(pdl: bool) -> None:
    """One graph, replayed with lengths other than those of its capture."""
    from peagle.kernels.attention.paged_triton import paged_attention_triton

    case = Case(4, 2, 64, [500, 300], [4, 4], [4, 4], None, True, True, 0)
    case.build(torch.bfloat16, "cuda")
    pages = case.pages("cuda")
    fresh_k, fresh_v = case.cache_k.clone(), case.cache_v.clone()
    args = (case.q, case.k, case.v, case.cache_k, case.cache_v, pages, None)
    paged_attention_triton(*args, pdl=pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention_triton(*args, pdl=pdl)
        out = paged_attention_triton(*args, pdl=pdl)
    for starts, live in ([[500, 300], [4, 4]], [[0, 65], [1, 4]], [[1, 2], [0, 3]], [[128, 499], [4, 0]]):
        case.cache_k.copy_(fresh_k.nan_to_num())
        case.cache_v.copy_(fresh_v.nan_to_num())
        case.starts, case.live = starts, live
        pages.num_computed_tokens_B.copy_(torch.tensor(starts))
        pages.query_lens_B.copy_(torch.tensor(live))
        out.fill_(float("nan"))

        def replay(*_: Tensor) -> Tensor:
            graph.replay()
            return out

        case.check(replay, 2e-2)
        assert not out.isnan().any()


@pytest.mark.gpu
def test_the_torch_version_takes_the_gpu_too() -> None:
    case = Case(2, 2, 32, [20, 3], [4, 4], [4, 3], 9, True, True, 0)
    case.build(torch.float32, "cuda")
    pages = case.pages("cuda")
    case.check(lambda *args: paged_attention_torch(*args, pages, 9), 1e-4)


if __name__ == "__main__":
    check_in_the_interpreter()
