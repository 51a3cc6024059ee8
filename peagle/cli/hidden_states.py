"""The verb `hidden-states`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import SERVER_PANEL, TRAINING_PANEL, app, examples
from peagle.config import EndpointSettings
from peagle.errors import UserError

server_option = partial(typer.Option, rich_help_panel=SERVER_PANEL)
training_option = partial(typer.Option, rich_help_panel=TRAINING_PANEL)


@app.command(
    "hidden-states",
    epilog=examples(
        "peagle hidden-states --recipe recipes/gpt-oss-120b-p-eagle.toml",
        "peagle hidden-states --recipe RECIPE --endpoint http://node0:8000 --endpoint http://node1:8000",
    ),
)
def hidden_states(
    recipe: Annotated[Path, training_option(help="Recipe with vllm_hidden_states, the output folder.")],
    endpoint: Annotated[
        list[str] | None,
        server_option(help="vLLM server that writes to the folder; repeat for several.", metavar="URL"),
    ] = None,
    concurrency: Annotated[
        int, server_option(help="Concurrent requests to each server.")
    ] = EndpointSettings.concurrency,
    timeout: Annotated[float, server_option(help="Seconds before a request is retried.")] = EndpointSettings.timeout_s,
) -> None:
    """Let vLLM servers write the hidden states a drafter is trained on.

    Without --endpoint, print the command that starts such a server. Rows with a file are not sent again.
    """
    from peagle.training.drafter_init import plan_drafter_config
    from peagle.training.hidden_states.vllm_client import request_hidden_states, vllm_serve_command
    from peagle.training.hidden_states.vllm_files import HiddenStatesFiles
    from peagle.training.recipe import make_recipe
    from peagle.training.run import load_training_inputs

    made = make_recipe(recipe, {})
    if made.train.vllm_hidden_states is None:
        raise UserError(f"--recipe {recipe}: lacks vllm_hidden_states, the folder for the files")
    inputs = load_training_inputs(made)
    folder = Path(made.train.vllm_hidden_states)
    folder.mkdir(parents=True, exist_ok=True)
    aux_layer_ids = plan_drafter_config(made.train, inputs.target).aux_layer_ids
    files = HiddenStatesFiles(folder, inputs.target, aux_layer_ids, made.train.max_seq_len)
    if not endpoint:
        print(vllm_serve_command(made.target, files))
        return
    servers = [EndpointSettings(url, concurrency=concurrency, timeout_s=timeout) for url in endpoint]
    num_sent = request_hidden_states(inputs.train_set, files, servers, print)
    print(f"{folder}: {len(files):,} files; {num_sent:,} rows sent")
