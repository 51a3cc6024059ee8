"""Sources of the target's hidden states: online, the disk cache with damaged shards and kills, and files of vLLM."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dense_reference as dense
import forks
import numpy as np
import pairs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import many

from peagle.checkpoints.target import load_decoder
from peagle.config import HiddenStatesDtype
from peagle.data.batches import PackedBatch, ResponseDataset, TrainingExample, pack
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.training.hidden_states import cache as cache_module
from peagle.training.hidden_states import online as aux_hidden_states
from peagle.training.hidden_states.cache import HiddenStatesCache, group_by_size
from peagle.training.hidden_states.online import (
    DocumentAttention,
    OnlineHiddenStates,
    TargetHiddenStates,
    target_weights_hash,
)
from peagle.training.hidden_states.vllm import VllmHiddenStates

pytestmark = pytest.mark.usefixtures("one_thread")
AUX_LAYER_IDS = (1, 2, 5)
LONGEST = 60


def row(i: int, length: int, prompt: int = 1) -> TrainingExample:
    start = 37 * i % 900
    return TrainingExample(tuple(pairs.TEXT[start : start + length]), ((prompt, length),), f"row-{i}")


def rows(*lengths: int) -> list[TrainingExample]:
    return [row(i, length) for i, length in enumerate(lengths)]


def arrays(examples: list[TrainingExample]) -> ResponseDataset:
    return ResponseDataset(
        token_T=np.array([t for e in examples for t in e.token_ids], np.int32),
        offset_E=np.cumsum([0, *(len(e.token_ids) for e in examples)]),
        span_S2=np.array([span for e in examples for span in e.spans], np.int32),
        span_offset_E=np.arange(len(examples) + 1),
        row_ids=tuple(e.row_id for e in examples),
        selected=np.arange(len(examples)),
    )


def packed(examples: list[TrainingExample]) -> PackedBatch:
    """Packs documents one after another, field by field."""
    lengths = [len(e.token_ids) for e in examples]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    spread = [(s, s + n) for s, n in zip(starts, lengths, strict=True) for _ in range(n)]
    return PackedBatch(  # type: ignore[arg-type]
        token_ids_N=torch.tensor([t for e in examples for t in e.token_ids]),
        position_N=torch.tensor([p for n in lengths for p in range(n)]),
        start_N=torch.tensor([s for s, _ in spread]),
        end_N=torch.tensor([e for _, e in spread]),
        loss_mask_N=torch.ones(sum(lengths), dtype=torch.bool),
        row_ids=tuple(e.row_id for e in examples),
    )


@pytest.fixture(scope="module")
def target() -> Decoder:
    return load_target()


@pytest.fixture(scope="module")
def half() -> Decoder:
    return load_decoder(pairs.target_folder(), torch.bfloat16)


def reference_states(
    target: Decoder, examples: list[TrainingExample], wanted: tuple[int, ...] = AUX_LAYER_IDS
) -> TargetHiddenStates:
    """The reference's states, document by document."""
    each = [dense.compute_target_states(target, torch.tensor([e.token_ids]), wanted) for e in examples]
    return TargetHiddenStates(torch.cat([h[0] for h, _ in each]), torch.cat([t[0] for _, t in each]))


def same(got: TargetHiddenStates, want: TargetHiddenStates) -> bool:
    return torch.equal(got.hidden_ND, want.hidden_ND) and torch.equal(
        got.aux_hidden_states_NX, want.aux_hidden_states_NX
    )


def close(got: TargetHiddenStates, want: TargetHiddenStates, tolerance: float) -> bool:
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in ((got.hidden_ND, want.hidden_ND), (got.aux_hidden_states_NX, want.aux_hidden_states_NX))
    )


# Online


def test_worked_example() -> None:
    """The table of the module's docstring."""
    attend = DocumentAttention(packed(rows(3, 2)).start_N)
    text = aux_hidden_states.__doc__ or ""
    for name, values in (
        ("index", attend.index_N),
        ("start", attend.start_N),
        ("low", attend.ranges(None).lo_R),
        ("low, 2", attend.ranges(2).lo_R),
        ("high", attend.ranges(None).hi_R),
    ):
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{name}  "))
        shown = line.strip().removeprefix(name).split()[:5]
        assert [int(x) for x in shown] == values.tolist(), name
    assert attend.ranges(None) is attend.ranges(None)


documents = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@many(30)
@given(lengths=documents, windows=st.lists(st.sampled_from([None, 1, 2, 7, 100]), min_size=5, max_size=5))
def test_online_states_equal_single_documents(lengths: list[int], windows: list[int | None]) -> None:
    model = Decoder(replace(pairs.TARGET, windows=tuple(windows))).double().requires_grad_(False)
    pairs.initialise(model, seed=3, scale=0.2)
    examples = rows(*lengths)
    got = OnlineHiddenStates(model, AUX_LAYER_IDS).states(packed(examples))
    begin = 0
    for example in examples:
        tokens = torch.tensor(example.token_ids)
        hidden, aux_hidden_states = model(tokens, torch.arange(len(tokens)), causal_attention, AUX_LAYER_IDS)
        end = begin + len(tokens)
        torch.testing.assert_close(got.hidden_ND[begin:end], hidden, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got.aux_hidden_states_NX[begin:end], aux_hidden_states, rtol=1e-10, atol=1e-10)
        begin = end


def test_online_states_equal_the_reference_without_gradients(target: Decoder) -> None:
    examples = rows(24, 1, 40, 13)
    model = load_decoder(pairs.target_folder()).requires_grad_(True)  # even if somebody forgot
    got = OnlineHiddenStates(model, AUX_LAYER_IDS).states(packed(examples))
    assert close(got, reference_states(target, examples), 2e-5)
    for x in (got.hidden_ND, got.aux_hidden_states_NX):
        assert not x.requires_grad and x.grad_fn is None
        weight = torch.ones(x.shape[1], requires_grad=True)
        (x * weight).sum().backward()  # inference tensors could not be saved for this


def test_target_weights_hash(target: Decoder, half: Decoder) -> None:
    own = target_weights_hash(target)
    assert own == target_weights_hash(load_decoder(pairs.target_folder()))
    other = load_decoder(pairs.target_folder())
    weight = other.layers[3].mlp.down_proj.weight
    weight[[5, 9]] = weight[[9, 5]]
    swapped = target_weights_hash(other)
    weight[[5, 9]] = weight[[9, 5]]
    assert target_weights_hash(other) == own
    weight[5, 9] = torch.nextafter(weight[5, 9], torch.tensor(9.0))
    assert len({own, swapped, target_weights_hash(other), target_weights_hash(half)}) == 4


# The cache


class CountingSource(OnlineHiddenStates):
    """Counts the computed rows by their ids."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, AUX_LAYER_IDS)
        self.rows: Counter[str] = Counter()

    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        self.rows.update(batch.row_ids)
        return super().states(batch)


LENGTHS = (24, 7, 40, 13, 31, 2, 55, 18, 9, 44)
TOO_LONG = row(10, 75, prompt=20)  # is trained on without its first 15 tokens
IN_SHARDS = ((0, 1), (2,), (3,), (4, 5), (6,), (7, 8), (9,), (10,))
SHARDS = [[f"row-{i}" for i in shard] for shard in IN_SHARDS]


def use_small_shards() -> None:
    cache_module.CACHE_SHARD_BYTES = 40 * 512  # 512 bytes a token in bf16: 4 states of 64
    cache_module.CACHE_FORWARD_TOKENS = 50


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE_SHARD_BYTES", "CACHE_FORWARD_TOKENS"):
        monkeypatch.setattr(cache_module, name, getattr(cache_module, name))  # restored after the test
    use_small_shards()


def data() -> list[TrainingExample]:
    return [*rows(*LENGTHS), TOO_LONG]


def trained() -> list[TrainingExample]:
    """The rows truncated as in batches."""
    return [*rows(*LENGTHS), replace(TOO_LONG, token_ids=TOO_LONG.token_ids[15:])]


def prepare(
    folder: Path, model: Decoder, dtype: HiddenStatesDtype = "bfloat16"
) -> tuple[HiddenStatesCache, list[str], list[str]]:
    """Fills a cache; returns it, the ids of the computed rows, and the reports."""
    online, reports = CountingSource(model), list[str]()
    cache = HiddenStatesCache(folder, arrays(data()), online, LONGEST, dtype)
    cache.fill(reports.append)
    assert all(times == 1 for times in online.rows.values())
    return cache, sorted(online.rows), reports


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("hidden-states-*.safetensors"))


def planned(lengths: list[int], token_bytes: int, shard_bytes: int) -> list[list[int]]:
    return [list(range(*group)) for group in group_by_size([n * token_bytes for n in lengths], shard_bytes)]


def test_shards_worked_example() -> None:
    """The example of the module's docstring."""
    assert planned([3, 4, 2], token_bytes=10, shard_bytes=75) == [[0, 1], [2]]


@many(60)
@given(lengths=st.lists(st.integers(1, 30), max_size=30), limit=st.integers(1, 400))
def test_shards_hold_all_rows_in_order(lengths: list[int], limit: int) -> None:
    shards = planned(lengths, 7, limit)
    assert [i for shard in shards for i in shard] == list(range(len(lengths)))
    sizes = [7 * sum(lengths[i] for i in shard) for shard in shards]
    assert all(size <= limit or len(shard) == 1 for shard, size in zip(shards, sizes, strict=True))
    assert all(size + 7 * lengths[after[0]] > limit for size, after in zip(sizes, shards[1:], strict=False))


def test_cache_returns_the_states_of_the_target(tmp_path: Path, half: Decoder) -> None:
    cache, computed, reports = prepare(tmp_path / "c", half)
    examples = trained()
    assert computed == sorted(e.row_id for e in examples)
    assert [[d.row_id for d in cache.documents[begin:end]] for begin, end in cache.shards] == SHARDS
    assert [path.name for path in files(tmp_path / "c")] == [f"hidden-states-{i:05d}.safetensors" for i in range(8)]
    # bitwise equal to the states at the time of writing: a shard's rows in one pass
    want = {}
    for shard in IN_SHARDS:
        together = [examples[i] for i in shard]
        shard_states = OnlineHiddenStates(half, AUX_LAYER_IDS).states(packed(together))
        lengths = [len(e.token_ids) for e in together]
        parts = zip(
            together,
            shard_states.hidden_ND.split(lengths),
            shard_states.aux_hidden_states_NX.split(lengths),
            strict=True,
        )
        want |= {e.row_id: (hidden, aux_hidden_states) for e, hidden, aux_hidden_states in parts}
    for epoch in range(3):  # whatever is beside a row
        for batch in pack(arrays(data()), 130, epoch=epoch, max_seq_len=LONGEST):
            got = cache.states(batch)
            hidden, aux_hidden_states = (torch.cat(x) for x in zip(*(want[i] for i in batch.row_ids), strict=True))
            assert got.hidden_ND.dtype == torch.bfloat16
            assert same(got, TargetHiddenStates(hidden, aux_hidden_states))
    assert any("to write" in line for line in reports)
    # beside the hidden states a shard has a header
    size = sum(path.stat().st_size for path in files(tmp_path / "c"))
    stored = cache.token_bytes * sum(cache.num_tokens)
    assert stored < size <= stored + 1024 * len(SHARDS)
    again, computed, reports = prepare(tmp_path / "c", half)
    assert not computed and not reports
    assert same(again.states(packed(examples)), cache.states(packed(examples)))


def test_cache_in_fp8(tmp_path: Path, target: Decoder) -> None:
    cache, _, _ = prepare(tmp_path / "c", target, "fp8")
    examples = trained()
    got, want = cache.states(packed(examples)), OnlineHiddenStates(target, AUX_LAYER_IDS).states(packed(examples))
    for a, b, parts in (
        (got.hidden_ND, want.hidden_ND, 1),
        (got.aux_hidden_states_NX, want.aux_hidden_states_NX, len(AUX_LAYER_IDS)),
    ):
        a, b = (x.unflatten(1, (parts, -1)).double() for x in (a, b))
        # half of the last of 3 bits; below the least normal number, half of that step
        step = b.abs().amax(-1, keepdim=True) / 448 * 2  # at most: the next power of two
        bound = torch.maximum(b.abs() * 2**-4, step * 2**-10) * 1.001
        assert ((a - b).abs() <= bound).all()
        assert (a != b).any()


def test_only_damaged_shards_are_written_again(tmp_path: Path, target: Decoder) -> None:
    folder = tmp_path / "c"
    cache, _, _ = prepare(folder, target)
    want = cache.states(packed(trained()))
    cut, gone = files(folder)[3], files(folder)[6]
    kept = {path: path.stat().st_mtime_ns for path in files(folder) if path not in (cut, gone)}
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    cache, computed, _ = prepare(folder, target)
    assert computed == sorted(SHARDS[3] + SHARDS[6])
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert same(cache.states(packed(trained())), want)


# Dies with half of the fourth shard on the disk.
KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1:3]
import torch
torch.set_num_threads(1)
import test_hidden_states
from peagle.training.hidden_states import cache as cache_module

real, calls = cache_module.save_file, []

def save_file(tensors, path):
    real(tensors, path)
    calls.append(path)
    if len(calls) == 4:
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

cache_module.save_file = save_file
test_hidden_states.use_small_shards()
test_hidden_states.prepare(test_hidden_states.Path(sys.argv[3]) / "c", test_hidden_states.load_target())
"""


def load_target() -> Decoder:
    return load_decoder(pairs.target_folder())


def test_killed_process_loses_only_its_current_shard(tmp_path: Path, target: Decoder) -> None:
    here = Path(__file__).parent
    given = [str(here), str(here.parent), str(tmp_path)]
    done = forks.Process("-c", KILLED, *given)
    assert done.wait() == -9, done.stderr()
    cache, computed, _ = prepare(tmp_path / "c", target)
    assert computed == sorted(row_id for shard in SHARDS[3:] for row_id in shard)
    assert close(cache.states(packed(trained())), reference_states(target, trained()), 0.02)
    assert not list((tmp_path / "c").glob(".*.unfinished"))


def test_full_disk(tmp_path: Path, target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = cache_module.shutil.disk_usage
    with monkeypatch.context() as patch:
        patch.setattr(cache_module.shutil, "disk_usage", lambda path: usage(path)._replace(free=100_000))
        with pytest.raises(UserError, match="0.00 GB free; use --hidden-states-dtype fp8"):
            prepare(tmp_path / "c", target)
        assert not files(tmp_path / "c")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (22_000, limits[1]))  # the fifth shard is larger
    try:
        with pytest.raises(UserError, match="cannot write hidden-states-00004"):
            prepare(tmp_path / "c", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(files(tmp_path / "c")) == 4
    cache, computed, _ = prepare(tmp_path / "c", target)
    assert computed == sorted(row_id for shard in SHARDS[4:] for row_id in shard)
    assert close(cache.states(packed(trained())), reference_states(target, trained()), 0.02)


def test_cache_of_another_run_is_refused(tmp_path: Path, target: Decoder, half: Decoder) -> None:
    folder, examples = tmp_path / "c", data()
    prepare(folder, target)

    def again(
        model: Decoder = target,
        wanted: tuple[int, ...] = AUX_LAYER_IDS,
        given: list[TrainingExample] = examples,
        longest: int = LONGEST,
        dtype: HiddenStatesDtype = "bfloat16",
    ) -> None:
        HiddenStatesCache(folder, arrays(given), OnlineHiddenStates(model, wanted), longest, dtype).fill()

    refused = {
        "another target;": {"model": half},
        "another --aux-layer-ids;": {"wanted": (1, 2)},
        "another data;": {"given": examples[:-1]},
        "another --max-seq-len;": {"longest": 61},
        "another --hidden-states-dtype;": {"dtype": "fp8"},
    }
    for message, change in refused.items():
        with pytest.raises(UserError, match=message):
            again(**change)  # type: ignore[arg-type]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        prepare(tmp_path / "d", target)
    (folder / "key.json").write_text("{}")
    with pytest.raises(UserError, match="another version of peagle"):
        again()


def test_row_with_other_tokens_is_refused(tmp_path: Path, target: Decoder) -> None:
    cache, _, _ = prepare(tmp_path / "c", target)
    known, other = row(0, 24), row(2, 40)
    for tokens in ((*other.token_ids[:-1], 1), (*other.token_ids, 1), other.token_ids[:-1], other.token_ids[1:]):
        with pytest.raises(UserError, match="row 'row-2' is missing or has other tokens"):
            cache.states(packed([known, replace(other, token_ids=tokens)]))


# What vLLM keeps


def vllm_file(folder: Path, target: Decoder, tokens: tuple[int, ...], name: str, read: int | None = None) -> None:
    """Writes a file as vLLM's connector does for layer ids 1, 2 and 5 of a target of 5 layers."""
    _, states = dense.compute_target_states(target, torch.tensor([tokens]), (1, 2, 5))
    hidden = states[0].unflatten(1, (3, -1))
    save_file({"hidden_states": hidden[:read].contiguous(), "token_ids": torch.tensor(tokens[:read])}, folder / name)


@pytest.fixture
def written(tmp_path: Path, target: Decoder) -> Iterator[Path]:
    """Files of rows 0, 2 (without its last token) and 10 (truncated)."""
    vllm_file(tmp_path, target, row(0, 24).token_ids, "0-ab.safetensors")
    vllm_file(tmp_path, target, trained()[10].token_ids, "1-cd.safetensors")
    vllm_file(tmp_path, target, row(2, 30).token_ids, "2-ef.safetensors", read=29)
    (tmp_path / "0-ab.safetensors.lock").touch()
    yield tmp_path


@pytest.mark.parametrize("wanted", [(1, 2, 5), (1, 2)])
def test_files_of_vllm(written: Path, target: Decoder, wanted: tuple[int, ...]) -> None:
    source = VllmHiddenStates(written, target, wanted, LONGEST)
    examples = [row(2, 30), row(0, 24), trained()[10]]
    source.check(arrays([row(0, 24), row(2, 30), TOO_LONG]))
    got, want = source.states(packed(examples)), reference_states(target, examples, wanted)
    last = torch.arange(len(want.hidden_ND)) == 29  # has no label, and no row in the file of vLLM
    assert close(
        TargetHiddenStates(got.hidden_ND[~last], got.aux_hidden_states_NX[~last]),
        TargetHiddenStates(want.hidden_ND[~last], want.aux_hidden_states_NX[~last]),
        1e-5,
    )
    assert not got.aux_hidden_states_NX[29].any() and not got.hidden_ND[29].any()
    with pytest.raises(UserError, match=r"1 of 2 rows have no file, first 'row-9'"):
        source.check(arrays([row(0, 24), row(9, 10)]))
    with pytest.raises(AssertionError, match="no file has the tokens of row 'row-0'"):
        source.states(packed([row(0, 22)]))


def test_wrong_files_of_vllm(written: Path, target: Decoder) -> None:
    expected = r"shape \[24, 3, 64\], expected \[24, 4, 64\]; set eagle_aux_hidden_state_layer_ids to \[1, 2, 4, 5\]"
    with pytest.raises(UserError, match=expected):
        VllmHiddenStates(written, target, (1, 2, 4), LONGEST)
    save_file({"weight": torch.ones(2)}, written / "3-gh.safetensors")
    with pytest.raises(UserError, match="not of vLLM"):
        VllmHiddenStates(written, target, AUX_LAYER_IDS, LONGEST)
    (written / "3-gh.safetensors").write_bytes((written / "0-ab.safetensors").read_bytes()[:50])
    with pytest.raises(UserError, match="unfinished"):
        VllmHiddenStates(written, target, AUX_LAYER_IDS, LONGEST)
