"""Paged and prefill attention against dense attention in fp64.

The Triton kernels run twice: in Triton's interpreter, in a child process, and compiled, under the marker `gpu`.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_interpreter import patch_interpreter, run_in_interpreter

from peagle.config import ChunkedAttention, Window
from peagle.kernels.attention.paged import paged_attention, paged_attention_torch, prefill_attention
from peagle.kernels.attention.types import AttentionLaunch, PagedAttentionInputs, PagedAttentionMetadata, QKNormRope
from peagle.kernels.fp8 import FP8_DTYPE, FP8_MAX

BLOCK = 16


@dataclass
class PagedCase:
    """One call on random data."""

    group: int
    kv_heads: int
    width: int
    num_computed: list[int]
    rows: list[int]
    query_lens: list[int]
    window: Window
    scattered: bool
    fused_qkv: bool
    seed: int
    has_sinks: bool = False  # attention sinks
    fp8: bool = False  # the cache's dtype

    def build(self, dtype: torch.dtype, device: str) -> None:
        gen = torch.Generator().manual_seed(self.seed)
        batch, heads = len(self.num_computed), self.group * self.kv_heads
        blocks_per_sequence = max((s + n) // BLOCK + 1 for s, n in zip(self.num_computed, self.query_lens, strict=True))
        blocks = batch * blocks_per_sequence + 3
        order = torch.randperm(blocks, generator=gen) if self.scattered else torch.arange(blocks)
        tables = order[: batch * blocks_per_sequence].view(batch, blocks_per_sequence).int()
        for b in range(batch):  # entries after the last used block must not matter
            tables[b, -(-(self.num_computed[b] + self.query_lens[b]) // BLOCK) :] = -12345
        self.tables = tables
        self.offsets = [sum(self.rows[:b]) for b in range(batch + 1)]
        shape = (blocks, BLOCK, self.kv_heads, self.width)
        cache = torch.randn(2, *shape, generator=gen)
        cache_k, cache_v = cache[0], cache[1]
        for b in range(batch):  # nor the cache contents behind the computed tokens
            for p in range(self.num_computed[b], self.num_computed[b] + self.query_lens[b]):
                cache[:, tables[b, p // BLOCK], p % BLOCK] = float("nan")
        cache_dtype = FP8_DTYPE if self.fp8 else dtype
        self.cache_k, self.cache_v = (x.to(cache_dtype).to(device) for x in (cache_k, cache_v))
        qkv = torch.randn(self.offsets[-1], heads + 2 * self.kv_heads, self.width, generator=gen)
        for b in range(batch):  # nor padding rows
            qkv[self.offsets[b] + self.query_lens[b] : self.offsets[b + 1], heads:] = float("nan")
        qkv = qkv.to(dtype).to(device)
        parts = qkv.split([heads, self.kv_heads, self.kv_heads], 1)
        self.q, self.k, self.v = parts if self.fused_qkv else tuple(x.clone() for x in parts)
        self.sinks = (2 * torch.randn(heads, generator=gen)).to(dtype).to(device) if self.has_sinks else None

    def metadata(self, device: str, max_context: int | None = None, prefill: bool = False) -> PagedAttentionMetadata:
        ints = {"dtype": torch.int32, "device": device}
        return PagedAttentionMetadata(
            self.tables.to(device),
            torch.tensor(self.num_computed, **ints),
            torch.tensor(self.query_lens, **ints),
            max(self.rows),
            torch.tensor(self.offsets, **ints) if prefill else None,
            max_context,
        )

    def inputs(self, metadata: PagedAttentionMetadata, rope: QKNormRope | None = None) -> PagedAttentionInputs:
        return PagedAttentionInputs(
            self.q, self.k, self.v, self.cache_k, self.cache_v, metadata, self.window, self.sinks, rope
        )

    def build_rope(self, norm: bool, dtype: torch.dtype, device: str) -> QKNormRope:
        rows, gen = self.offsets[-1], torch.Generator().manual_seed(self.seed)
        frequencies = 10.0 ** -torch.linspace(0, 4, self.width // 2)
        angles = torch.randint(0, 5000, (rows, 1), generator=gen).float() * frequencies
        angles = torch.cat([angles, angles], -1)[:, None, :]
        weights = [torch.randn(self.width, generator=gen).to(device, dtype) if norm else None for _ in range(2)]
        return QKNormRope(angles.cos().to(device, dtype), angles.sin().to(device, dtype), *weights, 1e-6)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the output (nan where undefined) and both caches, key by key."""
        q, k, v = (x.cpu().double() for x in (self.q, self.k, self.v))
        cache_k, cache_v = self.cache_k.cpu().double(), self.cache_v.cpu().double()
        new_k, new_v = self.k.cpu().double(), self.v.cpu().double()
        if self.fp8:
            new_k, new_v = (x.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE).double() for x in (new_k, new_v))
        out = torch.full(q.shape, float("nan"), dtype=torch.float64)
        for b, start in enumerate(self.num_computed):
            if not self.query_lens[b]:
                continue  # an empty request slot: its metadata is undefined
            first, end = self.offsets[b], start + self.query_lens[b]
            slots = [(int(self.tables[b, p // BLOCK]), p % BLOCK) for p in range(end)]
            for j in range(self.query_lens[b]):
                cache_k[slots[start + j]] = new_k[first + j]
                cache_v[slots[start + j]] = new_v[first + j]
            keys = torch.stack([cache_k[at] for at in slots])
            values = torch.stack([cache_v[at] for at in slots])
            for j in range(self.query_lens[b]):
                if isinstance(self.window, ChunkedAttention):
                    low = start + j - (start + j) % self.window.chunk_size
                else:
                    low = 0 if self.window is None else max(0, start + j - self.window + 1)
                for h in range(q.shape[1]):
                    g = h // self.group
                    weights = torch.exp(keys[low : start + j + 1, g] @ q[first + j, h] * self.width**-0.5)
                    sink = 0.0 if self.sinks is None else self.sinks[h].double().exp().cpu()
                    out[first + j, h] = weights @ values[low : start + j + 1, g] / (weights.sum() + sink)
        return out, cache_k, cache_v

    def check(self, run, metadata: PagedAttentionMetadata, tolerance: float, rope: QKNormRope | None = None) -> None:
        """With `rope`, `run` norms and rotates q and k."""
        inputs = self.inputs(metadata, rope)
        if rope is not None:
            self.q, self.k = rope.apply(self.q, self.k)
        expected, expected_k, expected_v = self.expected()
        out = run(inputs).cpu().double()
        # The sum of a norm may differ in its last bits; everything else is written exactly.
        step = 2 * tolerance if rope is not None and rope.has_norm else 0.0
        torch.testing.assert_close(self.cache_k.cpu().double(), expected_k, rtol=step, atol=step, equal_nan=True)
        torch.testing.assert_close(self.cache_v.cpu().double(), expected_v, rtol=0, atol=0, equal_nan=True)
        real = ~expected.isnan()
        torch.testing.assert_close(out[real], expected[real], rtol=tolerance, atol=tolerance)


SMALL = [(group, kv_heads, 8) for group in (1, 2, 3, 4) for kv_heads in (1, 2, 3)] + [(3, 3, 32), (4, 1, 32)]
TILED = [(1, 3, 16), (2, 1, 16), (3, 3, 16), (4, 2, 16), (3, 1, 32)]
COMPILED = [(3, 3, 64), (4, 2, 128)]  # few, as each is compiled several times


@st.composite
def paged_cases(
    draw: st.DrawFn, uniform: bool, max_rows: int, max_context: int, shapes: list[tuple[int, int, int]]
) -> PagedCase:
    """`shapes`: query heads per key/value head, key/value heads, head width."""
    batch = draw(st.integers(1, 3 if uniform else 5))
    group, kv_heads, width = draw(st.sampled_from(shapes))
    # Around the ends of blocks, key tiles and splits, and no context.
    edge = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193])
    context = st.one_of(edge, st.integers(0, max_context)).map(lambda n: min(n, max_context))
    rows = [draw(st.integers(1, max_rows))] * batch
    if not uniform:  # some have none
        rows = [draw(st.one_of(st.just(0), st.integers(1, max_rows), st.integers(1, max_rows))) for _ in rows]
        rows = rows if any(rows) else [1] * batch
    query_lens = [draw(st.one_of(st.just(n), st.integers(0, n))) for n in rows]
    return PagedCase(
        group=group,
        kv_heads=kv_heads,
        width=width,
        num_computed=[draw(context) for _ in range(batch)],
        rows=rows,
        query_lens=query_lens,
        window=draw(
            st.one_of(st.none(), st.sampled_from([1, 7, 16, 40, 100, ChunkedAttention(16), ChunkedAttention(27)]))
        ),
        scattered=draw(st.booleans()),
        fused_qkv=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        has_sinks=draw(st.booleans()),
    )


@pytest.mark.parametrize("fp8", [False, True])
@settings(max_examples=60, deadline=None)
@given(case=paged_cases(uniform=True, max_rows=20, max_context=90, shapes=SMALL))
def test_torch_paged(fp8: bool, case: PagedCase) -> None:
    case.fp8 = fp8
    case.build(torch.float32, "cpu")
    case.check(paged_attention, case.metadata("cpu"), 1e-5)


@pytest.mark.parametrize("fp8", [False, True])
@settings(max_examples=30, deadline=None)
@given(case=paged_cases(uniform=False, max_rows=100, max_context=70, shapes=SMALL))
def test_torch_prefill(fp8: bool, case: PagedCase) -> None:
    case.fp8 = fp8
    case.build(torch.float32, "cpu")
    case.check(prefill_attention, case.metadata("cpu", prefill=True), 1e-5)


def test_layers_with_different_windows_share_metadata() -> None:
    """The cached plan of one window must not be used for another."""
    case = PagedCase(2, 2, 8, [20, 3], [4, 4], [4, 3], None, True, True, 0)
    case.build(torch.float32, "cpu")
    metadata = case.metadata("cpu")
    for window in (None, 5, None, ChunkedAttention(5), 5):
        case.window = window
        case.build(torch.float32, "cpu")
        case.check(paged_attention, metadata, 1e-5)


def test_padding_rows_are_not_nan() -> None:
    case = PagedCase(2, 1, 8, [5, 0], [3, 3], [1, 0], None, False, True, 0)
    case.build(torch.float32, "cpu")
    out = paged_attention(case.inputs(case.metadata("cpu")))
    assert not out.isnan().any()


def check_saturation(device: str, attends: list) -> None:
    """Values beyond the range of fp8 become its largest, and nan stays nan."""
    for attend in attends:
        case = PagedCase(1, 1, 16, [3], [4], [4], None, False, True, 0, fp8=True)
        case.build(torch.float32, device)
        case.v[:, 0, :4] = torch.tensor([449.0, -1e9, float("inf"), float("nan")], device=device)
        attend(case.inputs(case.metadata(device, prefill="prefill" in attend.__name__)))
        written = case.cache_v.double()[case.tables[0, 0], 3:7, 0, :4].cpu()
        expected = torch.tensor([448.0, -448.0, 448.0, float("nan")]).double().expand(4, 4)
        torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)


def test_torch_saturates() -> None:
    check_saturation("cpu", [paged_attention, prefill_attention])


def check_triton_paged(
    case: PagedCase,
    dtype: torch.dtype,
    device: str,
    tile: int,
    splits: int,
    queries: int,
    rope_kind: str = "",
    prefetch: int = 0,
    warps: int = 4,
    programs: int = 0,
    segment_tiles: int = 1,
) -> None:
    """`rope_kind`: "" (q and k are already rotated), "plain" or "norm"."""
    from peagle.kernels.attention.paged_launch import PagedLaunchConfig
    from peagle.kernels.attention.paged_triton import paged_attention_triton

    case.build(dtype, device)
    launch = PagedLaunchConfig(
        tile, queries, splits, warps, 2 if dtype == torch.float32 else 3, prefetch, programs, 0, segment_tiles
    )
    rope = case.build_rope(rope_kind == "norm", dtype, device) if rope_kind else None
    case.check(partial(paged_attention_triton, launch=launch), case.metadata(device), tolerance(dtype), rope)


def check_batch_invariance(
    case: PagedCase, dtype: torch.dtype, device: str, launches: list, rope_kind: str = ""
) -> None:
    """Computes all rows at once with each launch (None: the default), each request alone, and each row alone.

    A row must get the same bits every time.
    """
    from peagle.kernels.attention.paged_triton import paged_attention_triton

    case.build(dtype, device)
    rope = case.build_rope(rope_kind == "norm", dtype, device) if rope_kind else None
    batch, most = len(case.num_computed), max(case.rows)
    caches = [case.cache_k.clone(), case.cache_v.clone()]
    metadata = case.metadata(device)

    def run(at: Tensor, some: PagedAttentionMetadata, launch) -> Tensor:
        own_rope = QKNormRope(rope.cos[at], rope.sin[at], rope.q_norm, rope.k_norm, 1e-6) if rope_kind else None
        args = (case.q[at], case.k[at], case.v[at], *caches, some, case.window, case.sinks, own_rope)
        return paged_attention_triton(PagedAttentionInputs(*args), launch)

    every = torch.arange(batch * most, device=device)
    outs = [run(every, metadata, launch) for launch in launches]
    valid = [b * most + j for b in range(batch) for j in range(case.query_lens[b])]
    for out in outs[1:]:
        assert torch.equal(out[valid], outs[0][valid])
    written = [x.clone() for x in caches]
    for b, count in enumerate(case.query_lens):
        if not count:
            continue
        own = PagedAttentionMetadata(
            metadata.block_tables_BM[b : b + 1],
            metadata.num_computed_tokens_B[b : b + 1],
            metadata.query_lens_B[b : b + 1],
            most,
        )
        at = every[b * most : (b + 1) * most]
        assert torch.equal(run(at, own, launches[0])[:count], outs[0][at[:count]]), "differs in a batch of one request"
        for j in {0, count // 2, count - 1}:
            one = PagedAttentionMetadata(
                own.block_tables_BM, own.num_computed_tokens_B + j, torch.ones_like(own.query_lens_B), 1
            )
            assert torch.equal(run(at[j : j + 1], one, launches[-1])[0], outs[0][at[j]]), "differs in a step of one row"
    for cache, before in zip(caches, written, strict=True):
        torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


def check_triton_prefill(case: PagedCase, dtype: torch.dtype, device: str, rows: int, tile: int) -> None:
    from peagle.kernels.attention.prefill_triton import prefill_attention_triton

    case.build(dtype, device)
    metadata = case.metadata(device, 0 if not any(case.num_computed) else None, prefill=True)
    run = partial(prefill_attention_triton, launch=AttentionLaunch(rows, tile, 4, 2))
    case.check(run, metadata, tolerance(dtype))


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


def test_triton_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def check_in_the_interpreter() -> None:
    from peagle.kernels.attention.paged_launch import PagedLaunchConfig
    from peagle.kernels.attention.paged_triton import paged_attention_triton
    from peagle.kernels.attention.prefill_triton import prefill_attention_triton

    patch_interpreter()
    # Shrinking would take minutes.
    phases = (Phase.explicit, Phase.generate)
    repeatable = settings(max_examples=12, deadline=None, derandomize=True, database=None, phases=phases)
    exact = {"dtype": torch.float32, "device": "cpu"}

    @repeatable
    @given(
        case=paged_cases(uniform=True, max_rows=10, max_context=140, shapes=TILED),
        tile=st.sampled_from([16, 32, 64]),
        splits=st.sampled_from([1, 2, 3, 5]),
        queries=st.sampled_from([16, 32]),
        rope_kind=st.sampled_from(["", "plain", "norm"]),
        programs=st.sampled_from([0, 1, 2, 3]),
        segment_tiles=st.sampled_from([1, 2]),
    )
    def paged(
        case: PagedCase, tile: int, splits: int, queries: int, rope_kind: str, programs: int, segment_tiles: int
    ) -> None:
        case.fp8 = case.seed % 2 == 1 and rope_kind != "norm"  # the sum of a norm decides how a key is rounded
        launch = {
            "tile": tile,
            "splits": splits,
            "queries": queries,
            "programs": programs,
            "segment_tiles": segment_tiles,
        }
        check_triton_paged(case, rope_kind=rope_kind, **launch, **exact)

    @settings(repeatable, max_examples=5)
    @given(
        case=paged_cases(uniform=True, max_rows=5, max_context=140, shapes=TILED),
        splits=st.sampled_from([2, 3, 5]),
        rope_kind=st.sampled_from(["", "norm"]),
        segment_tiles=st.sampled_from([1, 2]),
    )
    def bits(case: PagedCase, splits: int, rope_kind: str, segment_tiles: int) -> None:
        case.fp8 = case.seed % 2 == 1
        # numpy's matrix product is exact to the bit for one width only, so all launches use 16 queries
        launches = [PagedLaunchConfig(16, 16, splits, 4, 2, 0, programs, 0, segment_tiles) for programs in (1, 2, 0)]
        check_batch_invariance(case, launches=launches, rope_kind=rope_kind, **exact)

    @repeatable
    @given(
        case=paged_cases(uniform=False, max_rows=70, max_context=70, shapes=TILED),
        shape=st.sampled_from([(16, 16), (32, 16), (64, 32)]),
    )
    def prefill(case: PagedCase, shape: tuple[int, int]) -> None:
        case.fp8 = case.seed % 2 == 1
        check_triton_prefill(case, rows=shape[0], tile=shape[1], **exact)

    paged()
    bits()
    prefill()
    half = PagedCase(3, 3, 32, [70, 0, 33], [4, 4, 4], [4, 2, 0], None, True, True, 1)
    check_triton_paged(half, torch.float16, "cpu", 32, 2, 16, "plain")
    half.fp8 = True
    check_triton_paged(half, torch.float16, "cpu", 32, 2, 16, "plain")
    check_triton_prefill(half, torch.float16, "cpu", 32, 16)
    check_saturation("cpu", [paged_attention_triton, prefill_attention_triton])
    wide = PagedCase(8, 1, 512, [70], [3], [3], ChunkedAttention(32), True, True, 2)
    for attend in (paged_attention_triton, prefill_attention_triton):
        wide.build(torch.float32, "cpu")
        wide.check(attend, wide.metadata("cpu", prefill=attend is prefill_attention_triton), 1e-5)
    print("kernels checked")


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@settings(max_examples=30, deadline=None)
@given(
    case=paged_cases(uniform=True, max_rows=20, max_context=900, shapes=COMPILED),
    splits=st.sampled_from([1, 3, 16]),
    rope_kind=st.sampled_from(["", "plain"]),
    programs=st.sampled_from([0, 1, 2]),
)
def test_triton_paged_on_the_gpu(fp8: bool, case: PagedCase, splits: int, rope_kind: str, programs: int) -> None:
    """Launches of `choose_paged_launch`, but with query tiles narrow enough to need several."""
    case.fp8 = fp8
    tile, queries, prefetch, segment_tiles = (256, 16, 1, 2) if case.group == 3 else (128, 32, 2, 1)
    check_triton_paged(
        case, torch.bfloat16, "cuda", tile, splits, queries, rope_kind, prefetch, 8, programs, segment_tiles
    )


@pytest.mark.gpu
@settings(max_examples=8, deadline=None)
@given(case=paged_cases(uniform=True, max_rows=9, max_context=300, shapes=COMPILED[1:]))
def test_triton_paged_with_qk_norm_on_the_gpu(case: PagedCase) -> None:
    check_triton_paged(case, torch.bfloat16, "cuda", 128, 3, 32, "norm", 2, 8)


@pytest.mark.gpu
@settings(max_examples=10, deadline=None)
@given(
    case=paged_cases(uniform=True, max_rows=9, max_context=300, shapes=COMPILED[:1]),
    splits=st.sampled_from([1, 3]),
    rope_kind=st.sampled_from(["", "plain"]),
)
def test_triton_paged_fp32_on_the_gpu(case: PagedCase, splits: int, rope_kind: str) -> None:
    check_triton_paged(case, torch.float32, "cuda", 32, splits, 32, rope_kind)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@settings(max_examples=10, deadline=None)
@given(case=paged_cases(uniform=True, max_rows=9, max_context=300, shapes=[(4, 1, 256), (8, 8, 64), (8, 1, 512)]))
def test_wide_heads_on_the_gpu(fp8: bool, case: PagedCase) -> None:
    case.fp8 = fp8
    for attend in (paged_attention, prefill_attention):
        case.build(torch.bfloat16, "cuda")
        case.check(attend, case.metadata("cuda", prefill=attend is prefill_attention), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "rope_kind"),
    [
        (COMPILED[0], torch.bfloat16, "plain"),
        (COMPILED[1], torch.bfloat16, ""),
        ((4, 2, 128), torch.bfloat16, "norm"),
        (COMPILED[0], torch.float32, "plain"),
    ],
)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize("fp8", [False, True])
def test_batch_invariance_on_the_gpu(fp8, rows, window, shape, dtype, rope_kind) -> None:
    """Default launch, 8 requests of different lengths around the ends of tiles and beyond all splits."""
    num_computed = [0, 5, 60, 127, 250, 1023, 3000, 6000]
    case = PagedCase(*shape, num_computed, [rows] * 8, [rows] * 7 + [3], window, True, True, 0, fp8=fp8)
    check_batch_invariance(case, dtype, "cuda", [None], rope_kind)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@settings(max_examples=20, deadline=None)
@given(case=paged_cases(uniform=False, max_rows=300, max_context=300, shapes=COMPILED))
def test_triton_prefill_on_the_gpu(fp8: bool, case: PagedCase) -> None:
    case.fp8 = fp8
    check_triton_prefill(case, torch.bfloat16, "cuda", 128 if case.group == 3 else 64, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [[4, 4, 4], [40, 1, 200]])
@pytest.mark.parametrize("num_computed", [[0, 0, 0], [0, 100, 37]])
@pytest.mark.parametrize("fp8", [False, True])
def test_dispatch_on_the_gpu(fp8: bool, rows: list[int], num_computed: list[int], dtype: torch.dtype) -> None:
    case = PagedCase(4, 2, 64, num_computed, rows, rows, None, True, True, 0, fp8=fp8)
    case.build(dtype, "cuda")
    attend = paged_attention if len(set(rows)) == 1 else prefill_attention
    metadata = case.metadata("cuda", max(num_computed), prefill=attend is prefill_attention)
    case.check(attend, metadata, tolerance(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[1024], [130, 7], [300, 20]])
@pytest.mark.parametrize("fp8", [False, True])
def test_prompts_on_the_gpu(fp8: bool, rows: list[int]) -> None:
    """Without cached keys, each of these uses another implementation."""
    case = PagedCase(2, 2, 128, [0] * len(rows), rows, rows, None, True, True, 0, fp8=fp8)
    case.build(torch.bfloat16, "cuda")
    inputs = case.inputs(case.metadata("cuda", 0, prefill=True))
    exact = [*(x.float() for x in inputs[:3]), *(x.to(x.dtype if fp8 else torch.float32).clone() for x in inputs[3:5])]
    expected = paged_attention_torch(PagedAttentionInputs(*exact, inputs.metadata))
    actual = prefill_attention(inputs)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=2e-2)
    for cache, wanted in zip((case.cache_k, case.cache_v), exact[3:], strict=True):
        torch.testing.assert_close(cache.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_cuda_graph_replays_with_new_lengths() -> None:
    """Replays one graph with other lengths than at its capture."""
    from peagle.kernels.attention.paged_triton import paged_attention_triton

    case = PagedCase(4, 2, 64, [500, 300], [4, 4], [4, 4], None, True, True, 0)
    case.build(torch.bfloat16, "cuda")
    metadata = case.metadata("cuda")
    fresh_k, fresh_v = case.cache_k.clone(), case.cache_v.clone()
    inputs = case.inputs(metadata)
    paged_attention_triton(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention_triton(inputs)
        out = paged_attention_triton(inputs)
    for num_computed, query_lens in ([[500, 300], [4, 4]], [[0, 65], [1, 4]], [[1, 2], [0, 3]], [[128, 499], [4, 0]]):
        case.cache_k.copy_(fresh_k.nan_to_num())
        case.cache_v.copy_(fresh_v.nan_to_num())
        case.num_computed, case.query_lens = num_computed, query_lens
        metadata.num_computed_tokens_B.copy_(torch.tensor(num_computed))
        metadata.query_lens_B.copy_(torch.tensor(query_lens))
        out.fill_(float("nan"))

        def replay(_: PagedAttentionInputs) -> Tensor:
            graph.replay()
            return out

        case.check(replay, metadata, 2e-2)
        assert not out.isnan().any()


@pytest.mark.gpu
def test_fp8_saturates_on_the_gpu() -> None:
    from peagle.kernels.attention.paged_triton import paged_attention_triton
    from peagle.kernels.attention.prefill_triton import prefill_attention_triton

    check_saturation("cuda", [paged_attention_triton, prefill_attention_triton, paged_attention_torch])


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_torch_on_the_gpu(fp8: bool) -> None:
    case = PagedCase(2, 2, 32, [20, 3], [4, 4], [4, 3], 9, True, True, 0, fp8=fp8)
    case.build(torch.float32, "cuda")
    case.check(paged_attention_torch, case.metadata("cuda"), 1e-4)


if __name__ == "__main__":
    check_in_the_interpreter()
