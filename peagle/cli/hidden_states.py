"""`states`: what the target says to each token of the data, written by vLLM servers for `train --vllm-states`.

Knows nothing about how they are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import app, examples
from peagle.config import EndpointSettings
from peagle.errors import UserError


@app.command(
    "hidden-states",
    epilog=examples(
        "peagle hidden-states --recipe recipes/gpt-oss-120b-p-eagle.toml",
        "peagle hidden-states --recipe recipes/gpt-oss-120b-p-eagle.toml --endpoint http://node1:8000 --endpoint http://node2:8000",
    ),
)
def hidden_states(
    recipe: Annotated[Path, typer.Option(help="Of the training run; its --vllm-states is where they go.")],
    endpoint: Annotated[
        list[str] | None, typer.Option(help="A vLLM that writes there; may be given several times.", metavar="URL")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests to each at once.")] = EndpointSettings.concurrency,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is sent again.")] = EndpointSettings.timeout_s,
) -> None:
    """Let vLLM write the hidden states that a drafter is trained on.

    Without --endpoint it prints the command that starts such a server. Rows that have a file are not sent again.
    """
    from peagle.training.hidden_states.vllm_client import ask_states, serve_command
    from peagle.training.hidden_states.vllm_files import HiddenStatesFiles
    from peagle.training.recipe import make_recipe
    from peagle.training.run import load_training_inputs, plan_drafter_config

    made = make_recipe(recipe, {})
    if made.train.vllm_states is None:
        raise UserError(f"--recipe {recipe}: names no vllm_states, the folder that they go to")
    material = load_training_inputs(made)
    folder = Path(made.train.vllm_states)
    folder.mkdir(parents=True, exist_ok=True)
    aux_layer_ids = plan_drafter_config(made.train, material.target).aux_layer_ids
    files = HiddenStatesFiles(folder, material.target, aux_layer_ids, made.train.max_length)
    if not endpoint:
        print(serve_command(made.target, files))
        return
    servers = [EndpointSettings(url, concurrency=concurrency, timeout_s=timeout) for url in endpoint]
    sent = ask_states(material.rows, files, servers, print)
    print(f"{folder}: {len(files):,} files; {sent:,} rows were sent")
