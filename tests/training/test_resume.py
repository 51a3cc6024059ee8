"""A run that was killed, stopped or out of disk space resumes with bitwise equal results."""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file

from peagle.checkpoints.drafter import load_drafter
from peagle.checkpoints.files import write_json, write_weights
from peagle.checkpoints.target import load_decoder
from peagle.data.batches import BatchCursor
from peagle.errors import UserError
from peagle.training.resume import RunFolder, TrainingState
from peagle.training.run import train

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_STEP = 1e-9  # minutes between saves


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> Path:
    """20 steps without interruption."""
    torch.set_num_threads(1)
    outcome = train(runs.recipe(home), home / "uninterrupted", "cpu")
    assert outcome.finished and outcome.state.step == 20
    assert [line["step"] for line in runs.lines(home / "uninterrupted")] == [3, 6, 9, 12, 15, 18, 20]
    return home / "uninterrupted"


def check_same(out: Path, uninterrupted: Path) -> None:
    assert runs.lines(out) == runs.lines(uninterrupted)
    got, want = runs.saved(out), runs.saved(uninterrupted)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    files = [load_file(folder / "model.safetensors") for folder in (out, uninterrupted)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[1])


def test_kill_during_a_save_and_a_step(home: Path, uninterrupted: Path) -> None:
    out = home / "killed"
    recipe = runs.recipe(home, save_minutes=EVERY_STEP)
    process = runs.start(recipe, out, "--hang-in-save", "10")
    process.wait_for("saving")
    process.kill()
    process.wait()
    folder = RunFolder(out)
    assert folder.newest_state() == folder.inner / "step-00000009-0"
    assert [line["step"] for line in runs.lines(out)] == [3, 6, 9]

    process = runs.start(recipe, out, "--slow", "0.2")
    output = process.wait_for("step 12")
    process.kill()  # somewhere in steps 12 to 14
    process.wait()
    assert "resuming from step 9" in output

    outcome = train(recipe, out, "cpu")
    assert outcome.finished
    check_same(out, uninterrupted)
    there = {p.name for p in folder.inner.glob("*")}
    assert there - {"tensorboard"} == {"best", "data.json", "lock", "step-00000020-0"}


def test_stop_by_signal(home: Path, uninterrupted: Path) -> None:
    out = home / "stopped"
    process = runs.start(runs.recipe(home), out, "--slow", "0.3")
    process.wait_for("step 3")
    process.kill(signal.SIGINT)
    assert process.wait() == 0
    output = process.stdout()
    assert '"finished": false' in output and "stopping after this step" in output
    newest = RunFolder(out).newest_state()
    assert newest is not None and 3 <= int(newest.name.split("-")[1]) < 20
    # what is there is a checkpoint already
    load_drafter(out, load_decoder(runs.target_folder(home)))
    assert train(runs.recipe(home), out, "cpu").finished
    check_same(out, uninterrupted)
    assert train(runs.recipe(home), out, "cpu").state.step == 20  # nothing is left to do
    check_same(out, uninterrupted)


@pytest.fixture(scope="module")
def constant_lr_run(home: Path) -> Path:
    """7 steps without interruption, with a learning rate that does not depend on the length of the run."""
    train(runs.recipe(home, steps=7, lr_schedule="constant"), home / "constant_lr_run", "cpu")
    return home / "constant_lr_run"


def test_longer_run_continues_a_shorter_one(home: Path, constant_lr_run: Path) -> None:
    """The resumed part follows the longer run's schedule."""
    out = home / "longer"
    assert train(runs.recipe(home, steps=4, lr_schedule="constant"), out, "cpu").finished
    assert train(runs.recipe(home, steps=7, lr_schedule="constant"), out, "cpu").finished
    # the shorter run logged its last step, which the longer one had no reason to
    assert [line for line in runs.lines(out) if line["step"] == 3] == runs.lines(constant_lr_run)[:1]
    assert all(
        torch.equal(runs.saved(out)[name], x) for name, x in runs.saved(constant_lr_run).items() if name != "unlogged"
    )


def test_full_disk(home: Path, constant_lr_run: Path) -> None:
    out = home / "full"
    train(runs.recipe(home, steps=3, lr_schedule="constant"), out, "cpu")
    recipe = runs.recipe(home, steps=7, lr_schedule="constant", save_minutes=EVERY_STEP)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))  # a state is larger, a checkpoint is not
        with pytest.raises(UserError, match=r"cannot be written .*; earlier states are intact"):
            train(recipe, out, "cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert RunFolder(out).newest_state() == RunFolder(out).inner / "step-00000003-0"
    assert not list(RunFolder(out).inner.glob("unfinished*"))
    assert train(recipe, out, "cpu").finished
    check_same(out, constant_lr_run)


def test_stop_after_a_time_limit(home: Path) -> None:
    """A process without time left takes one step, saves and is not finished."""
    outcome = train(runs.recipe(home), home / "paused", "cpu", stop_after=0.0)
    assert (outcome.state.step, outcome.finished) == (1, False)
    assert RunFolder(home / "paused").read_state() == outcome.state


def test_run_with_other_settings_is_refused(home: Path, uninterrupted: Path) -> None:
    with pytest.raises(UserError, match=r"another recipe: lr was 0.002, is 0.004 \(and 1 more\)"):
        train(runs.recipe(home, lr=4e-3, seed=3), uninterrupted, "cpu")
    with pytest.raises(UserError, match="--resume never"):
        train(runs.recipe(home), uninterrupted, "cpu", resume="never")
    with pytest.raises(UserError, match="--resume must"):
        train(runs.recipe(home), home / "nowhere", "cpu", resume="must")
    (home / "other").mkdir()
    (home / "other" / "mine.txt").touch()
    with pytest.raises(UserError, match="holds no training run"):
        train(runs.recipe(home), home / "other", "cpu")
    with RunFolder(uninterrupted).lock(), pytest.raises(UserError, match="another process is training"):
        train(runs.recipe(home), uninterrupted, "cpu")
    recipe = runs.recipe(home)
    runs.data_file(home, rows=47)
    try:
        with pytest.raises(UserError, match="48.* 47"):
            train(recipe, uninterrupted, "cpu")
    finally:
        runs.data_file(home)


# A kill before every file operation


class Killed(BaseException):
    """A BaseException, so that no handler cleans up."""


class FileSystemKiller:
    """Raises before the n-th change of the file system, from an audit hook of the interpreter."""

    events = ("open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")

    def __init__(self) -> None:
        self.left: int | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        if self.left is None or event not in self.events:
            return
        if event == "open" and not (isinstance(args[1], str) and set(args[1]) & set("wax+")):
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise Killed


KILLERS: list[FileSystemKiller] = []  # hooks stay for good, so there is one


def file_system_killer() -> FileSystemKiller:
    if not KILLERS:
        KILLERS.append(FileSystemKiller())
    return KILLERS[0]


LAYOUT: list[list[object]] = [["w", [4], 0]]


def write_version(folder: RunFolder, version: int) -> None:
    """Writes a checkpoint and a state whose contents name their version."""

    def checkpoint(into: Path) -> None:
        write_weights({"w": torch.full((4,), float(version))}, into)
        write_json({"version": version}, into / "config.json")

    folder.publish(checkpoint)
    tensors = {"masters": torch.full((4,), float(version))}
    folder.save(TrainingState(step=version // 2, tokens=version, cursor=BatchCursor(version, 1)), tensors, LAYOUT)


def seen_version(folder: RunFolder) -> tuple[int, int]:
    """Versions of the state and of the published checkpoint after recovery; each must be consistent."""
    folder.recover()
    found = folder.load(LAYOUT)
    assert found is not None
    state, tensors = found
    assert state.cursor.epoch == state.tokens and torch.all(tensors["masters"] == state.tokens)
    top = int(load_file(folder.out / "model.safetensors")["w"][0])
    assert not list(folder.out.glob(".*unfinished*"))
    assert (folder.out / "config.json").read_text() == f'{{\n  "version": {top}\n}}\n'
    return state.tokens, top


def test_kill_at_any_file_operation(tmp_path: Path) -> None:
    moments = 0
    for version in range(2, 90):
        folder = RunFolder(tmp_path / "run")
        if version == 2:
            folder.create()
            write_version(folder, version)
        # steps are version // 2, so that the same step is also saved twice
        before = seen_version(folder)
        file_system_killer().left = moments
        try:
            write_version(folder, 100 + version)
            killed = False
        except Killed:
            killed = True
        file_system_killer().left = None
        after = seen_version(folder)
        assert after[0] in (before[0], 100 + version) and after[1] in (before[1], 100 + version)
        assert not list(folder.inner.glob("unfinished*")) and len(list(folder.inner.glob("step-*"))) == 1
        if not killed:
            assert after == (100 + version, 100 + version)
            assert moments > 15
            return
        moments += 1
    raise AssertionError("it never came to an end")


def test_damaged_states_are_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_version(folder, 8)
    with pytest.raises(UserError, match="another shape"):
        folder.load([["w", [5], 0]])
    (folder.inner / "step-00000004-0" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match=r"step-00000004-0.*damaged or truncated"):
        folder.load(LAYOUT)
    (folder.inner / "step-00000004-0" / "state.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        folder.load(LAYOUT)
