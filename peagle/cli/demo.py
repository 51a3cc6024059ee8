"""`demo`: the same answers three times, by the target alone, with an EAGLE-3 drafter and with a P-EAGLE drafter.

Knows flags and what is said at the end; nothing about how it looks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.cli.app import (
    DeviceOption,
    JsonOption,
    NumSpeculativeTokensOrAuto,
    app,
    console,
    examples,
    parse_num_speculative_tokens,
)
from peagle.cli.race import Racer, Run, first_difference, race, speed_up, together
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_DRAFTER, DEFAULT_TARGET, EAGLE3_DRAFTER, resolve_drafter, resolve_target

if TYPE_CHECKING:
    from peagle.engine.llm import LLM

TARGET_NAME = "SmolLM2-135M"
WAYS = (("alone", None), ("EAGLE-3", EAGLE3_DRAFTER), ("P-EAGLE", DEFAULT_DRAFTER))  # what all are held against first
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why is the sky blue?",
    "Give three tips for a good night's sleep.",
)
CONTEXT, CACHE_BYTES = 2048, 1 << 30  # the cache is made for one sequence of so many tokens, which takes far less


@app.command(
    epilog=examples("peagle demo", 'peagle demo "Tell me a story." "Count to 20." --max-tokens 200', "peagle demo -k 7")
)
def demo(
    prompts: Annotated[list[str] | None, typer.Argument(help="What to ask.", show_default="three of its own")] = None,
    draft_tokens: NumSpeculativeTokensOrAuto = "auto",
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 96,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: float32 on the CPU, bfloat16 on a GPU.")
    ] = "auto",
    device: DeviceOption = "auto",
    no_color: Annotated[bool, typer.Option("--no-color", help="Accepted drafts underlined instead of shaded.")] = False,
    as_json: JsonOption = False,
) -> None:
    """See speculation work: SmolLM2-135M answers alone, with an EAGLE-3 and with a P-EAGLE drafter, side by side."""
    from peagle.cli.demo_view import View

    k = parse_num_speculative_tokens(draft_tokens)
    params = SamplingParams(max_tokens=max_tokens)
    asked = tuple(prompts or PROMPTS)
    if any(not text.strip() for text in asked):
        raise UserError("the prompt is empty")
    with console(stderr=True).status(f"loading {TARGET_NAME}") as status:
        ids, decode, racers = _line_up(asked, k, dtype, device, lambda text: status.update(text))
    dtype, threads = _setting(racers[0].llm)
    view = View(decode, no_color, silent=as_json)
    view.open(f"{TARGET_NAME} in {dtype} on {threads}", k)
    runs: list[list[Run]] = []  # by prompt, then by way
    for number, (text, prompt_ids) in enumerate(zip(asked, ids, strict=True), 1):
        for racer in racers:
            racer.ask(prompt_ids, params)
        with view.prompt(f"{number} of {len(asked)}: {text}", racers) as watch:
            race(racers, watch)
        runs.append([racer.run for racer in racers])
    totals = [together(way) for way in zip(*runs, strict=True)]
    parted = [first_difference(of_prompt) for of_prompt in runs]
    equal = all(place is None for place in parted)
    if as_json:
        about = {"target": DEFAULT_TARGET, "dtype": dtype, "machine": threads, "draft_tokens": k, "equal": equal}
        answers = [
            {"prompt": text, "text": decode(ways[0].token_ids), "runs": [_figures(run, ways[0]) for run in ways]}
            for text, ways in zip(asked, runs, strict=True)
        ]
        print(json.dumps({**about, "prompts": answers, "together": [_figures(run, totals[0]) for run in totals]}))
    view.close(totals, equal)
    if not equal:
        number, place = next((i, place) for i, place in enumerate(parted, 1) if place is not None)
        where = f"the texts differ from token {place + 1} of prompt {number} on"
        if dtype == "float32":
            raise UserError(f"{where}: please report this, it must never happen")
        view.note(
            f"{where[0].upper()}{where[1:]}: in {dtype} two tokens can be as good as tied, and a pass over more rows "
            "may round to the other one. In float32 they are equal (--dtype float32)."
        )


def _line_up(
    asked: Sequence[str], k: int | Literal["auto"], dtype: str, device: str, tell: Callable[[str], None]
) -> tuple[list[list[int]], Callable[[list[int]], str], list[Racer]]:
    """The prompts as token ids, what makes text of such, and who answers, warmed up."""
    target = resolve_target(DEFAULT_TARGET)
    folders = [(name, drafter, resolve_drafter(drafter) if drafter else None) for name, drafter in WAYS]

    import torch

    from peagle.checkpoints.target import encode_prompt, load_tokenizer, read_target_config
    from peagle.engine.llm import LLM
    from peagle.speculative.reference import check_prompt

    tokenizer = load_tokenizer(target)
    ids = [encode_prompt(tokenizer, text, raw=False) for text in asked]
    for prompt_ids in ids:
        check_prompt(prompt_ids, read_target_config(target).vocab_size, CONTEXT)
    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": CONTEXT, "kv_cache_memory_bytes": CACHE_BYTES}
    options["enable_prefix_caching"] = False  # nobody has read the prompt before
    options["device"] = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if dtype != "auto" or options["device"] == "cpu":
        options["dtype"] = dtype if dtype != "auto" else "float32"
    racers: list[Racer] = []
    for name, drafter, folder in folders:
        if folder is not None:
            tell(f"loading its {name} drafter, and timing rounds with drafts")
        llm = LLM(racers[0].llm.target if racers else target, folder, k if folder is not None else "auto", **options)
        llm.lookahead = 0  # a turn ends with its tokens
        llm.generate([encode_prompt(tokenizer, "Hello", raw=False)], SamplingParams(max_tokens=4))
        racers.append(Racer(name, drafter, llm))
    return ids, lambda some: tokenizer.decode(some, skip_special_tokens=True), racers


def _setting(llm: LLM) -> tuple[str, str]:
    """The dtype's name, and the machine's in words."""
    import torch

    if llm.model_runner.device.type == "cuda":
        return llm.dtype, f"one {torch.cuda.get_device_name(llm.model_runner.device)}"
    count = torch.get_num_threads()
    return llm.dtype, f"the CPU ({count} thread{'s' * (count > 1)})"


def _figures(run: Run, alone: Run) -> dict[str, Any]:
    return {**run.as_json(), "speed_up": round(speed_up(run, alone), 4)}
