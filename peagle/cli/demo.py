"""`peagle demo`: the target alone, with an EAGLE-3 drafter and with a P-EAGLE drafter, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.cli.app import (
    OUTPUT_PANEL,
    DeviceOption,
    DtypeOption,
    JsonOption,
    NumSpeculativeTokensOrAuto,
    app,
    console,
    examples,
    parse_num_speculative_tokens,
)
from peagle.cli.demo_runner import DemoEngine, DemoResult, find_first_difference, merge_results, run_in_turns
from peagle.cli.generate import MaxTokens
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_DRAFTER, DEFAULT_TARGET, EAGLE3_DRAFTER, resolve_drafter, resolve_target

if TYPE_CHECKING:
    from peagle.engine.llm import LLM

TARGET_NAME = "SmolLM2-135M"
METHODS = (("alone", None), ("EAGLE-3", EAGLE3_DRAFTER), ("P-EAGLE", DEFAULT_DRAFTER))  # the baseline first
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why is the sky blue?",
    "Give three tips for a good night's sleep.",
)
MAX_MODEL_LEN, KV_CACHE_BYTES = 2048, 1 << 30


@app.command(
    epilog=examples("peagle demo", 'peagle demo "Tell me a story." "Count to 20." --max-tokens 200', "peagle demo -k 7")
)
def demo(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.", show_default="three examples")] = None,
    num_speculative_tokens: NumSpeculativeTokensOrAuto = "auto",
    max_tokens: MaxTokens = 96,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    no_color: Annotated[
        bool,
        typer.Option(
            "--no-color", help="Underline accepted draft tokens instead of shading.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """See speculative decoding at work: SmolLM2-135M alone, with an EAGLE-3 drafter and with a P-EAGLE drafter."""
    from peagle.cli.demo_view import DemoView

    k = parse_num_speculative_tokens(num_speculative_tokens)
    params = SamplingParams(max_tokens=max_tokens)
    texts = tuple(prompts or PROMPTS)
    if any(not text.strip() for text in texts):
        raise UserError("the prompt is empty")
    with console(stderr=True).status(f"loading {TARGET_NAME}") as status:
        prompt_token_ids, decode, engines = _build_engines(texts, k, dtype, device, lambda text: status.update(text))
    dtype, device_name = _describe_device(engines[0].llm)
    view = DemoView(decode, no_color, silent=as_json)
    view.show_start(f"{TARGET_NAME} in {dtype} on {device_name}", k)
    results: list[list[DemoResult]] = []  # by prompt, then by method
    for number, (text, token_ids) in enumerate(zip(texts, prompt_token_ids, strict=True), 1):
        for engine in engines:
            engine.start_request(token_ids, params)
        with view.show_prompt(f"{number} of {len(texts)}: {text}", engines) as update:
            run_in_turns(engines, update)
        results.append([engine.result for engine in engines])
    totals = [merge_results(method) for method in zip(*results, strict=True)]
    differences = [find_first_difference(of_prompt) for of_prompt in results]
    equal = all(difference is None for difference in differences)
    if as_json:
        summary = {
            "target": DEFAULT_TARGET,
            "dtype": dtype,
            "device": device_name,
            "num_speculative_tokens": k,
            "equal": equal,
            "prompts": [
                {
                    "prompt": text,
                    "text": decode(methods[0].token_ids),
                    "results": [result.to_json(methods[0]) for result in methods],
                }
                for text, methods in zip(texts, results, strict=True)
            ],
            "total": [result.to_json(totals[0]) for result in totals],
        }
        print(json.dumps(summary))
    view.show_totals(totals, equal)
    if not equal:
        number, position = next(
            (i, difference) for i, difference in enumerate(differences, 1) if difference is not None
        )
        message = f"the outputs differ from token {position + 1} of prompt {number} on"
        if dtype == "float32":
            raise UserError(f"{message}: this is a bug, please report it")
        view.print_line(
            f"{message[0].upper()}{message[1:]}: in {dtype} two tokens may tie, and a batch of another size may round "
            "to the other one. In float32 the outputs are equal (--dtype float32)."
        )


def _build_engines(
    texts: Sequence[str],
    num_speculative_tokens: int | Literal["auto"],
    dtype: str,
    device: str,
    report_progress: Callable[[str], None],
) -> tuple[list[list[int]], Callable[[list[int]], str], list[DemoEngine]]:
    """Returns the encoded prompts, a decode function, and one warmed-up engine per method."""
    target = resolve_target(DEFAULT_TARGET)
    drafter_folders = [resolve_drafter(drafter) if drafter else None for _, drafter in METHODS]

    import torch

    from peagle.checkpoints.target import encode_prompt, load_tokenizer, read_target_config
    from peagle.engine.llm import LLM
    from peagle.speculative.reference import check_prompt

    tokenizer = load_tokenizer(target)
    prompts = [encode_prompt(tokenizer, text, raw=False) for text in texts]
    for prompt_token_ids in prompts:
        check_prompt(prompt_token_ids, read_target_config(target).vocab_size, MAX_MODEL_LEN)
    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": MAX_MODEL_LEN}
    options |= {"kv_cache_memory_bytes": KV_CACHE_BYTES, "enable_prefix_caching": False}
    options["device"] = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if dtype != "auto" or options["device"] == "cpu":
        options["dtype"] = dtype if dtype != "auto" else "float32"
    engines: list[DemoEngine] = []
    for (name, drafter), folder in zip(METHODS, drafter_folders, strict=True):
        if folder is not None:
            report_progress(f"loading the {name} drafter and timing decode steps")
        shared_target = engines[0].llm.target if engines else target
        llm = LLM(shared_target, folder, num_speculative_tokens if folder is not None else "auto", **options)
        llm.max_in_flight_steps = 0  # a step returns its own tokens
        llm.generate([encode_prompt(tokenizer, "Hello", raw=False)], SamplingParams(max_tokens=4))
        engines.append(DemoEngine(name, drafter, llm))
    return prompts, lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True), engines


def _describe_device(llm: LLM) -> tuple[str, str]:
    """Returns the names of the dtype and of the device."""
    import torch

    if llm.model_runner.device.type == "cuda":
        return llm.dtype, f"one {torch.cuda.get_device_name(llm.model_runner.device)}"
    num_threads = torch.get_num_threads()
    return llm.dtype, f"the CPU ({num_threads} thread{'s' * (num_threads > 1)})"
