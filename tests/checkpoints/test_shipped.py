"""The drafters that come with the package: a build holds them whole, and they help the target they are for."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from peagle import LLM, SamplingParams
from peagle.hub.resolve import DEFAULT_DRAFTER, EAGLE3_DRAFTER, resolve_drafter

REPO = Path(__file__).resolve().parents[2]
MOST_BYTES = 45_000_000  # of both together: every version stays in the history
FRANCE = [{"role": "user", "content": "What is the capital of France? Say a little about it."}]


def test_a_build_holds_everything_and_finds_them_by_name(tmp_path: Path) -> None:
    # not by importing it: where another test has loaded distutils before it, setuptools refuses
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("the build asks for setuptools 77")
    source, built = tmp_path / "source", tmp_path / "built"
    shutil.copytree(REPO / "peagle", source / "peagle", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(REPO / name, source)
    (source / "checkpoints").symlink_to(REPO / "checkpoints")
    left = built / "peagle" / "drafters" / DEFAULT_DRAFTER / "model-00001-of-00009.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of an earlier build")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not left.exists()
    ours = {path.relative_to(source) for path in (source / "peagle").rglob("*") if path.is_file()}
    assert all((built / path).is_file() for path in ours), "a file of the package stays behind"
    code = "from peagle.hub.resolve import *\nprint(*map(resolve_drafter, shipped_drafters()), sep='\\n')"
    env = {**os.environ, "PYTHONPATH": str(built)}
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    folders = [Path(line) for line in found.stdout.splitlines()]
    assert [folder.name for folder in folders] == [EAGLE3_DRAFTER, DEFAULT_DRAFTER], found.stderr
    size = 0
    for folder in folders:
        assert folder.is_relative_to(built)
        here = REPO / "checkpoints" / folder.name
        wanted = {path.name for path in here.iterdir() if path.suffix in (".safetensors", ".json", ".md")}
        assert {path.name for path in folder.iterdir()} == wanted
        assert all(filecmp.cmp(folder / name, here / name, shallow=False) for name in wanted)
        size += sum(path.stat().st_size for path in here.iterdir())
    assert size < MOST_BYTES


@pytest.mark.parametrize("name", [DEFAULT_DRAFTER, EAGLE3_DRAFTER])
def test_they_help_and_change_nothing(name: str, smollm2: Path) -> None:
    """A drafter whose aux_hidden_states, mask or layers were read wrongly still drafts, but is hardly ever right."""
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 1, "max_model_len": 256}
    llm = LLM(smollm2, resolve_drafter(name), 3, **options)
    params = SamplingParams(max_tokens=24)
    helped = llm.chat(FRANCE, params)[0].outputs[0]
    alone = LLM(llm.target, None, **options).chat(FRANCE, params)[0].outputs[0]
    assert helped.token_ids == alone.token_ids
    assert helped.acceptance_length > 1.5
