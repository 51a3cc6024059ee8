"""Runs every `peagle` command of docs/deploying.md, with moto as AWS.

Other programs are not run; the files that they use must be ones that earlier commands wrote.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from aws import ACCOUNT, pretended
from pairs import drafter_folder, target_folder

from peagle.cli import main

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "deploying.md"
OTHER_PROGRAMS = {"pip", "sh", "systemctl", "docker", "kubectl"}


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    whole = [re.sub(r"\\\n\s*", "", block) for block in blocks]
    return [line for block in whole for line in block.splitlines() if line.strip()]


def test_every_command_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moto.sagemakerruntime.models import sagemakerruntime_backends

    shutil.copytree(target_folder(), tmp_path / "my-model")
    shutil.copytree(drafter_folder("p-eagle-4"), tmp_path / "my-drafter")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    ran = 0
    with pretended("us-west-2", "my-bucket") as aws:
        answer = json.dumps({"choices": [{"message": {"content": "Because."}}]})
        sagemakerruntime_backends[ACCOUNT]["us-west-2"].results_queue.append((answer, "application/json", "all", ""))
        for line in commands():
            before, _, into = line.partition(" > ")
            words = shlex.split(before, comments=True)
            if words[0] != "peagle":
                assert words[0] in OTHER_PROGRAMS, line
                for word in words:
                    assert not word.startswith("deploy/") or Path(word).is_file(), line
                    assert not word.endswith(".service") or Path("deploy", word).is_file(), line
                continue
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as ended:
                main()
            printed = capsys.readouterr()
            assert not ended.value.code, f"{line}: {printed.err}"
            if into:
                Path(into).write_text(printed.out)
            ran += 1
        assert not aws.sagemaker.list_endpoints()["Endpoints"] and not aws.s3.list_objects_v2(Bucket="my-bucket").get(
            "Contents"
        ), "the guide deletes what it creates"
    assert ran >= 10 and Path("my-llm.yaml").read_text().startswith("# Written by")
