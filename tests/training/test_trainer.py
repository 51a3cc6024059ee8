"""The trainer against torch's AdamW, gradients of the dense reference, and schedules written as formulas."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import dense_reference as dense
import pairs
import pytest
import runs
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import peagle.cli  # noqa: F401  the verbs
from peagle.checkpoints.drafter import load_drafter, trained_num_speculative_tokens
from peagle.checkpoints.target import load_decoder
from peagle.cli.app import app
from peagle.config import TrainConfig
from peagle.data.batches import PackedBatch, batches, load_responses
from peagle.errors import UserError
from peagle.models.drafter import Drafter
from peagle.training import resume
from peagle.training.cod_sampling import CodPositions, sample_cod_positions, sampling_generator
from peagle.training.distributed import DistributedContext
from peagle.training.drafter_init import create_drafter
from peagle.training.hidden_states.online import OnlineHiddenStates
from peagle.training.optimizer import Optimizer, Schedule, is_decayed, plan_flat_buffer
from peagle.training.resume import RunFolder, TrainingState
from peagle.training.run import train, write_drafter
from peagle.training.trainer import Trainer, load_steps, prefetch
from peagle.training.validation import AcceptanceCounts, ValidationAcceptance

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


# The optimizer


def test_flat_buffer_layout() -> None:
    """The example of the module's docstring."""
    pieces, size = plan_flat_buffer([("b", (2,)), ("A", (2, 3))], alignment=4)
    assert [(p.name, p.start, p.size) for p in pieces] == [("A", 0, 6), ("b", 8, 2)]
    boundary = next(p.start for p in pieces if not is_decayed(p.name, p.shape))
    assert (boundary, size) == (8, 12)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.fc, self.norm = nn.Embedding(7, 5), nn.Linear(5, 3, bias=False), nn.LayerNorm(3)
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(self.embed_tokens(x)))


def small(seed: int, dtype: torch.dtype) -> Small:
    torch.manual_seed(seed)
    return Small().to(dtype)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps_equal_torch_adamw(clip: float) -> None:
    """One flat buffer equals AdamW per parameter, with weight decay on matrices only."""
    cfg = TrainConfig(max_grad_norm=clip, weight_decay=0.3, beta1=0.8, beta2=0.9)
    ours, theirs = small(0, torch.float64), small(0, torch.float64)
    optimizer = Optimizer(ours, cfg)
    decayed = [theirs.fc.weight]
    rest = [theirs.embed_tokens.weight, *theirs.norm.parameters()]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], betas=(0.8, 0.9)
    )
    rng = torch.Generator().manual_seed(1)
    for step in range(6):
        token_ids, lr = torch.randint(0, 7, (4, 3), generator=rng), 0.1 / (step + 1)
        weight = torch.randn(4, 3, generator=rng, dtype=torch.float64)
        for x, w in zip(token_ids, weight, strict=True):  # as many backward passes as a step has chunks
            (ours(x) * w).pow(3).sum().backward()
        (theirs(token_ids) * weight[:, None]).pow(3).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([*decayed, *rest], clip or math.inf)
        assert torch.allclose(optimizer.step(lr), norm, rtol=1e-6 if clip else 1e-12)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        reference.zero_grad()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-6 if clip else 1e-9, atol=1e-12), name  # torch clips a millionth more
        assert all(p.grad is None for p in ours.parameters()) and not optimizer.grad_P.any()


def test_bf16_has_fp32_masters() -> None:
    """Gradients of chunks are summed in fp32, steps too small for bf16 add up, and the saved state is complete."""
    cfg = TrainConfig(max_grad_norm=0.0, weight_decay=0.0)
    module = small(0, torch.bfloat16)
    optimizer = Optimizer(module, cfg)
    weight = module.fc.weight
    total, summed = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.bfloat16)
    rng = torch.Generator().manual_seed(0)
    for _ in range(300):
        part = (torch.rand(3, 5, generator=rng) + 0.5).bfloat16()
        (weight * part).sum().backward()
        total += part.double()
        summed += part
    piece = next(p for p in optimizer.slices if p.name == "fc.weight")
    assert torch.allclose(piece.view(optimizer.collect()).double(), total, rtol=1e-6)
    assert not torch.allclose(summed.double(), total, rtol=1e-2)  # what `.grad` alone would have come to

    optimizer.grad_P.zero_()
    before, start = weight.clone(), piece.view(optimizer.masters_P).clone()
    for _ in range(50):
        weight.grad = torch.ones_like(weight)  # put there by hand: no hook runs
        optimizer.step(1e-5)
    assert torch.allclose(piece.view(optimizer.masters_P), start - 50e-5, atol=2e-5)
    assert torch.equal(weight, piece.view(optimizer.masters_P).bfloat16()) and not torch.equal(weight, before)

    again = Optimizer(small(1, torch.bfloat16), cfg)
    again.restore({name: x.clone() for name, x in optimizer.state().items()}, 50)
    for one in (optimizer, again):
        one.grad_P.fill_(0.25)
        one.step(1e-2)
    assert torch.equal(again.masters_P, optimizer.masters_P) and torch.equal(again.working_P, optimizer.working_P)


# The schedule


def test_schedules() -> None:
    def rates(decay: str, steps: int = 100) -> list[float]:
        schedule = Schedule(TrainConfig(lr=1.0, warmup_steps=10, lr_schedule=decay, steps=steps), 1.0)  # type: ignore[arg-type]
        return [schedule.learning_rate(s, schedule.progress(s, 0.0)) for s in range(steps)]

    assert rates("constant") == [min(1.0, (s + 1) / 10) for s in range(100)]
    for s, rate in enumerate(rates("cosine")):
        assert rate == pytest.approx(min(1, (s + 1) / 10) * (0.02 + 0.49 * (1 + math.cos(math.pi * s / 100))))
    for s, rate in enumerate(rates("trapezoid")[10:], start=10):
        assert rate == pytest.approx(0.02 + 0.98 * min(1.0, (100 - s) / 25))
    assert rates("linear")[50] == pytest.approx(0.51)


def test_warmup_takes_at_most_a_tenth() -> None:
    """Of the steps or of the minutes, whichever ends first; the example of the docstring of `Schedule`."""

    def full_at(seconds_per_step: float, **length: float) -> int:
        """The first step, counted from 1, with the peak learning rate; the rate rises until then."""
        schedule = Schedule(TrainConfig(lr=1.0, warmup_steps=100, lr_schedule="constant", **length), 1.0)  # type: ignore[arg-type]
        rates = [schedule.learning_rate(s, schedule.progress(s, s * seconds_per_step)) for s in range(200)]
        assert rates == sorted(rates) and rates[0] > 0.0 and rates[-1] == 1.0
        return rates.index(1.0) + 1

    assert [full_at(1.0, steps=steps) for steps in (5000, 1000, 200, 8)] == [100, 100, 20, 1]
    assert full_at(0.1, minutes=10.0) == 100  # 10 s
    assert full_at(3.0, minutes=10.0) == 21  # 20 steps have taken a minute
    assert full_at(30.0, minutes=60.0) == 20  # 12 steps have taken a tenth, which is too few
    assert full_at(3.0, minutes=10.0, steps=5000) == full_at(3.0, minutes=10.0, steps=200) + 1 == 21


def test_run_lengths() -> None:
    """In steps, minutes and epochs; the shortest ends the run."""
    both = Schedule(TrainConfig(steps=100, minutes=2.0), 7.0)
    assert [both.progress(50, 0), both.progress(0, 30), both.progress(50, 90), both.progress(101, 0)] == [
        0.5,
        0.25,
        0.75,
        1.0,
    ]
    assert Schedule(TrainConfig(epochs=2.5), 7.0).steps == 18
    assert Schedule(TrainConfig(), 7.0).steps == 28
    assert Schedule(TrainConfig(epochs=2, steps=5), 7.0).steps == 5
    timed = Schedule(TrainConfig(minutes=1.0, lr=1.0, warmup_steps=0, lr_schedule="linear"), 7.0)
    assert timed.steps is None and timed.learning_rate(3, timed.progress(3, 30.0)) == pytest.approx(0.51)


# The whole step


def reference_loss(
    drafter: Drafter, target: Any, work: list[tuple[PackedBatch, CodPositions]], weights: list[float]
) -> Tensor:
    """Document by document with stored masks: sum over depths of weight * mean over all rows of that depth."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in weights]
    counts = [0] * len(weights)
    for batch, rows in work:
        for start in batch.start_N.unique().tolist():
            end = int(batch.end_N[start])
            tokens = batch.token_ids_N[start:end][None]
            chains = [(a, 0) for a in range(end - start - 2)]  # all of depth 0 is seen, also without a label
            with_loss = {(int(a) - start, 0) for a in rows.anchor_A if start <= a < end}
            for a, d in zip(rows.anchor_R.tolist(), rows.depth_R.tolist(), strict=True):
                if start <= a < end:
                    chains.append((a - start, d))
                    with_loss.add((a - start, d))
            chains.sort(key=lambda c: (c[1], c[0]))
            laid = dense.DensePositions(torch.tensor([a for a, _ in chains]), torch.tensor([d for _, d in chains]))
            hidden, aux_hidden_states = dense.compute_target_states(target, tokens, drafter.cfg.aux_layer_ids)
            output = dense.compute_drafter_outputs(drafter, tokens, aux_hidden_states, laid)
            losses = dense.position_losses(drafter, output, target.compute_logits(hidden[:, laid.position_R + 1]))[0]
            for chain, row_loss in zip(chains, losses, strict=True):
                if chain in with_loss:
                    sums[chain[1]] = sums[chain[1]] + row_loss
                    counts[chain[1]] += 1
    return sum((w * s / n for w, s, n in zip(weights, sums, counts, strict=True)), torch.zeros(()))


@pytest.mark.parametrize("settings", [{"method": "p-eagle"}, {"method": "eagle3", "train_embeddings": True}])
def test_steps_equal_the_dense_reference(home: Path, settings: dict[str, Any]) -> None:
    """Three steps of two batches each: gradients through the dense path, then torch's AdamW."""
    usual = {
        "dtype": "float64",
        "objective": "ce",
        "loss_weighting": "uniform",
        "gradient_accumulation_steps": 2,
        "steps": 3,
        "depth_decay": 0.7,
        "warmup_steps": 1,
    }
    recipe = runs.recipe(home, **settings, **usual)
    out = home / f"oracle-{settings['method']}"
    assert train(recipe, out, "cpu").finished
    cfg = recipe.train
    target = load_decoder(runs.target_folder(home), torch.float64)
    rows = load_responses(recipe.data, None, pairs.VOCAB)
    drafter = create_drafter(cfg, target, None, (), torch.zeros(pairs.VOCAB))
    decayed = [p for n, p in drafter.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in drafter.named_parameters() if p.dim() != 2 or "embed" in n]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        betas=(cfg.beta1, cfg.beta2),
    )
    stream = batches(rows, cfg.batch_tokens, cfg.seed, max_seq_len=cfg.max_seq_len)
    weights = [w / (1 + 0.7 + 0.49) for w in (1, 0.7, 0.49)]
    logged = []
    for step in range(3):
        work = []
        for i in range(2):
            batch, _ = next(stream)
            work.append(
                (
                    batch,
                    sample_cod_positions(batch, 3, cfg.down_sample_ratio, sampling_generator(cfg.seed, 2 * step + i)),
                )
            )
        loss = reference_loss(drafter, target, work, weights)
        loss.backward()
        logged.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), cfg.max_grad_norm)
        lr = cfg.lr * min(1, (step + 1) / cfg.warmup_steps) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / 3)))
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        reference.zero_grad()
    got = load_drafter(out, target, torch.float64).state_dict()
    for name, want in drafter.state_dict().items():
        assert torch.allclose(got[name], want, rtol=0, atol=1e-7), (
            name
        )  # AdamW magnifies rounding where gradients vanish
    (line,) = runs.lines(out)
    assert line["positions_by_depth"][0] > line["positions_by_depth"][1] > line["positions_by_depth"][2] > 0
    assert line["step"] == 3 and min(logged) <= line["loss"] <= max(logged)


# The run


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "eagle3", "activation_checkpointing": True, "init": "random"},
        {"num_layers": 2, "train_embeddings": True, "train_lm_head": True, "objective": "kl"},
        {"draft_vocab_size": 30, "fc_norm": False, "chunk_size": "auto"},
    ],
)
def test_loss_falls(home: Path, settings: dict[str, Any]) -> None:
    out = home / "-".join(map(str, settings.values()))
    recipe = runs.recipe(home, **settings, steps=15, log_every=3, lr=5e-3)
    train(recipe, out, "cpu")
    losses = [line["loss"] for line in runs.lines(out)]
    assert losses[-1] < 0.8 * losses[0]
    drafter = load_drafter(out, load_decoder(runs.target_folder(home)))
    cfg = recipe.train
    assert trained_num_speculative_tokens(out) == 3 and drafter.cfg.parallel == (cfg.method == "p-eagle")
    assert (drafter.cfg.num_layers, drafter.cfg.own_embeddings) == (cfg.num_layers, cfg.train_embeddings)
    assert drafter.cfg.own_head == (cfg.train_lm_head or cfg.draft_vocab_size is not None)
    assert (drafter.d2t is not None) == (cfg.draft_vocab_size is not None)


def test_bf16_run(home: Path) -> None:
    """One step: the checkpoint is bf16, the state has fp32 masters that round to it."""
    train(runs.recipe(home, dtype="bfloat16", steps=1, num_depths=2, batch_tokens=64), home / "bf16", "cpu")
    tensors = load_file(home / "bf16" / "model.safetensors")
    assert {x.dtype for x in tensors.values()} == {torch.bfloat16}
    masters = runs.saved(home / "bf16")["masters"]
    assert masters.dtype == torch.float32 and not torch.equal(masters, masters.bfloat16().float())
    assert torch.equal(tensors["fc.weight"].flatten(), masters[: tensors["fc.weight"].numel()].bfloat16())


def counts(length: float) -> ValidationAcceptance:
    total = AcceptanceCounts(1, 100, (round(100 * (length - 1)),))
    return ValidationAcceptance(**vars(total), without_loops=total)


def trainer(home: Path, out: Path, lengths: list[float], **settings: Any) -> Trainer:
    """A trainer whose validations return these acceptance lengths."""
    cfg = runs.recipe(home, **settings).train
    target = load_decoder(runs.target_folder(home))
    rows = load_responses(runs.recipe(home).data, None, pairs.VOCAB)
    drafter = create_drafter(cfg, target, None, (), torch.zeros(pairs.VOCAB))
    folder = RunFolder(out)
    folder.create()

    def write_checkpoint(into: Path, state: TrainingState, measured: ValidationAcceptance | None) -> None:
        write_drafter(into, drafter, 3)
        (into / "step").write_text(str(state.step))

    remaining = iter(lengths)
    return Trainer(
        cfg=cfg,
        drafter=drafter,
        target=target,
        hidden_states=OnlineHiddenStates(target, drafter.cfg.aux_layer_ids),
        data=rows,
        schedule=Schedule(cfg, 1.0),
        folder=folder,
        world=DistributedContext(),
        validate=lambda _: counts(next(remaining)),
        write_checkpoint=write_checkpoint,
        chunk_size=32,
    )


def test_best_checkpoint_is_kept(home: Path) -> None:
    out = home / "best"
    state = trainer(home, out, [1.2, 1.5, 1.4, 1.1], steps=8, validation_every=2).run()
    assert (state.best_step, state.best_acceptance) == (4, 1.5)
    assert (out / "step").read_text() == "4"
    measured = [(line["step"], line["is_best"]) for line in runs.lines(out) if line["kind"] == "validation"]
    assert measured == [(2, True), (4, True), (6, False), (8, False)]
    # the state is the last step's all the same, and a longer run knows what it has to beat
    again = trainer(home, out, [1.45, 1.6], steps=12, validation_every=2).run()
    assert (again.best_step, (out / "step").read_text()) == (12, "12")


def test_non_finite_gradient(home: Path) -> None:
    """It stops at the next line of the log, names the step, and leaves the state before it."""
    out = home / "nan"
    good = trainer(home, out, [], steps=2, warmup_steps=0, lr_schedule="constant", validation_every=0)
    good.validate = None
    good.run()
    bad = trainer(
        home,
        out,
        [],
        steps=9,
        warmup_steps=0,
        lr_schedule="constant",
        lr=1e30,
        max_grad_norm=0.0,
        weight_decay=0.0,
        log_every=8,
    )
    with pytest.raises(UserError) as caught:
        bad.run()
    message = str(caught.value)
    # step 3 makes the weights infinite, step 4 meets them
    assert message.startswith("step 4: the gradient is not finite;") and "--lr" in message
    newest = RunFolder(out).newest_state()
    assert newest is not None and newest.name.startswith("step-00000002") and str(newest) in message
    assert all(x.isfinite().all() for x in runs.saved(out).values())


def test_run_without_validation_prints_the_reason(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the 256 positions that the target has, answers would leave 6 for a prompt."""
    for validation_size, num_lines in ((4, 1), (0, 0)):
        train(
            runs.recipe(home, steps=1, validation_size=validation_size, validation_tokens=250),
            home / f"blind-{validation_size}",
            "cpu",
        )
        assert capsys.readouterr().out.count("no validation, the newest drafter is published") == num_lines


def test_log_has_each_step_once(home: Path) -> None:
    """Also if a run resumes from a step before the last logged one."""
    out = home / "logged"
    settings = {"log_every": 1, "validation_every": 2, "lr_schedule": "constant", "warmup_steps": 0}
    trainer(home, out, [1.2], steps=2, **settings).run()
    state = RunFolder(out).newest_state()
    assert state is not None
    kept = shutil.copytree(state, home / "logged-kept")
    trainer(home, out, [1.5, 1.4], steps=5, **settings).run()
    newest = RunFolder(out).newest_state()
    assert newest is not None and newest != state
    shutil.rmtree(newest)  # as if it had been killed before it was saved
    kept.rename(state)
    trainer(home, out, [1.6, 1.3], steps=6, **settings).run()
    lines = resume.read_log(out / "log.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    measured = [(line["step"], line["acceptance_length"]) for line in lines if line["kind"] == "validation"]
    assert measured == [(2, pytest.approx(1.2)), (4, pytest.approx(1.6)), (6, pytest.approx(1.3))]


def test_batches_do_not_depend_on_the_number_of_ranks(home: Path) -> None:
    """Two ranks with one batch each load the batches of one rank with two."""
    rows = load_responses(runs.recipe(home).data, None, pairs.VOCAB)

    def load_batches(cfg: TrainConfig, rank: int, size: int) -> list[tuple[PackedBatch, CodPositions]]:
        with prefetch(load_steps(rows, cfg, DistributedContext(rank, size), TrainingState(), None)) as ready:
            return [batch[:2] for _ in range(15) for batch in next(ready)[0]]  # over the end of an epoch

    alone = load_batches(runs.recipe(home, gradient_accumulation_steps=2).train, 0, 1)
    both = [load_batches(runs.recipe(home).train, rank, 2) for rank in (0, 1)]
    for i, (batch, drawn) in enumerate(alone):
        other, other_rows = both[i % 2][i // 2]
        assert torch.equal(batch.token_ids_N, other.token_ids_N) and torch.equal(drawn.anchor_R, other_rows.anchor_R)


def test_progress_bar(home: Path, terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal, lines of steps are in the bar; the last one and validations stay."""
    trainer(home, home / "bar", [1.2, 1.3], steps=4, log_every=1, validation_every=2).run()
    printed = capsys.readouterr()
    assert printed.out == "" and "100%  0:00:00 left  step 4  loss" in printed.err
    assert "step 2: acceptance length 1.200" in printed.err


def test_tensorboard_shows_the_log(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step once, also where a run went on from a step before the last logged one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = home / "board"
    settings = {"log_every": 1, "validation_every": 2, "lr_schedule": "constant", "warmup_steps": 0}
    trainer(home, out, [1.2], steps=2, **settings).run()
    state = RunFolder(out).newest_state()
    assert state is not None
    kept = shutil.copytree(state, home / "board-kept")
    trainer(home, out, [1.5, 1.4], steps=5, **settings).run()
    newest = RunFolder(out).newest_state()
    assert newest is not None and newest != state
    shutil.rmtree(newest)  # as if it had been killed before it was saved
    kept.rename(state)
    trainer(home, out, [1.6, 1.3], steps=6, **settings).run()

    shown = EventAccumulator(str(out / ".training" / "tensorboard")).Reload()
    lines = resume.read_log(out / "log.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    want = {name: [line[name] for line in steps] for name in ("loss", "lr", "grad_norm", "tokens_per_second")}
    for name, depth in itertools.product(("loss", "match", "accept", "prefix_match", "positions"), range(3)):
        want[f"{name}/depth_{depth}"] = [line[f"{name}_by_depth"][depth] for line in steps]
    for name, values in want.items():
        got = shown.Scalars(name)
        assert [e.step for e in got] == [1, 2, 3, 4, 5, 6], name
        assert [e.value for e in got] == pytest.approx(values, rel=1e-6), name
    measured = [(e.step, e.value) for e in shown.Scalars("acceptance_length")]
    assert measured == [(2, pytest.approx(1.2)), (4, pytest.approx(1.6)), (6, pytest.approx(1.3))]
    assert set(shown.Tags()["scalars"]) == {*want, "acceptance_length", "memory_gb"}

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # where it is not installed
    trainer(home, home / "no-board", [1.2], steps=2, **settings).run()
    assert len(runs.lines(home / "no-board")) == 3 and not (home / "no-board" / ".training" / "tensorboard").exists()


def test_fit(tmp_path: Path) -> None:
    """`peagle fit`, and again: nothing is generated, trained or measured twice."""
    target = runs.target_folder(tmp_path, tokenizer=True)
    lines = [json.dumps({"prompt": bytes(p).decode()}) + "\n" for p in pairs.prompts(24) if bytes(p).strip()]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    out = tmp_path / "out"
    command = f"fit {tmp_path / 'prompts.jsonl'} --out {out} -t {target} --device cpu --max-tokens 24 --steps 6"
    command += (
        " --batch-tokens 200 --max-seq-len 100 --num-depths 3 --num-layers 1 --aux-layer-ids 1,2,4 --validation-size 4"
    )
    command += " --validation-tokens 16 --log-every 4 --mask-token 150 --validation-every 3"
    refused = CliRunner().invoke(app, f"{command} --samples 2 --vary 4".split())
    assert "chat template adds nothing after a user turn" in str(refused.exception)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert all(
        stage in result.output
        for stage in ("1/3", "2/3", "3/3", "finished after 6 steps", "K=1: acceptance length 1.", "K=3:")
    )
    card = (out / "README.md").read_text()
    assert "| 4 | 3 |" in card and "| 4 | 1 |" in card and "tokens seen" in card
    assert "lk-hybrid, acceptance weighting" in card
    assert [line["kind"] for line in runs.lines(out)].count("validation") == 2
    load_drafter(out, load_decoder(target))
    files = (out / "model.safetensors", out / "log.jsonl", out / "README.md", out / ".training" / "acceptance.json")
    before = {path: path.stat().st_mtime_ns for path in files}
    again = CliRunner().invoke(app, command.split())
    assert again.exit_code == 0 and "step 3:" not in again.output
    assert [s for s in again.output.splitlines() if "K=" in s] == [s for s in result.output.splitlines() if "K=" in s]
    assert before == {path: path.stat().st_mtime_ns for path in before}
