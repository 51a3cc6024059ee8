"""`peagle demo`: the target alone, with an EAGLE-3 drafter and with a P-EAGLE drafter, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli.app import console, verb
from peagle.config import EngineSettings, SamplingParams
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_DRAFTER, DEFAULT_TARGET, EAGLE3_DRAFTER

if TYPE_CHECKING:
    from peagle.cli.demo_view import DemoEngine

TARGET_NAME = "SmolLM2-135M"
METHODS = (
    ("target alone", None),
    ("with EAGLE-3", EAGLE3_DRAFTER),
    ("with P-EAGLE", DEFAULT_DRAFTER),
)  # the baseline first
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why is the sky blue?",
    "Give three tips for a good night's sleep.",
)
PARAMS = SamplingParams(max_tokens=96)
ENGINE = EngineSettings(max_num_seqs=1, max_model_len=2048, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False)


@verb("peagle demo", 'peagle demo "Tell me a story." "Count to 20." --max-tokens 200', "peagle demo -k 7")
def demo(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.", show_default="three examples")] = None,
    params: Annotated[SamplingParams, "max_tokens"] = PARAMS,
    settings: Annotated[EngineSettings, "num_speculative_tokens", "device", "dtype"] = ENGINE,
) -> None:
    """See speculative decoding at work: SmolLM2-135M alone, with an EAGLE-3 drafter and with a P-EAGLE drafter."""
    from rich.text import Text

    from peagle.cli.demo_view import DemoView, run_in_turns

    texts = tuple(prompts or PROMPTS)
    if any(not text.strip() for text in texts):
        raise UserError("the prompt is empty")
    with console(stderr=True).status(f"loading {TARGET_NAME}") as status:
        prompt_token_ids, decode, engines = _build_engines(texts, settings, lambda text: status.update(text))
    dtype, device = engines[0].llm.dtype, str(engines[0].llm.model_runner.device)
    view = DemoView(decode)
    view.print_line(
        f"{TARGET_NAME} in {dtype} on {device}, K = {settings.num_speculative_tokens}. Each engine has its own clock."
    )
    if view.screen.is_terminal:
        view.screen.print(Text.assemble("Accepted draft tokens look ", ("like this", view.draft_style), "."))
    different: list[int] = []  # prompts
    for number, (text, token_ids) in enumerate(zip(texts, prompt_token_ids, strict=True), 1):
        for engine in engines:
            engine.start_request(token_ids, params)
        with view.show_prompt(f"{number} of {len(texts)}: {text}", engines) as update:
            run_in_turns(engines, update)
        if len({tuple(engine.requests[-1].output_token_ids) for engine in engines}) > 1:
            different.append(number)
    view.show_totals(engines)
    if not different:
        view.print_line("All outputs are equal, token for token.")
    if different and dtype == "float32":
        raise UserError(f"the outputs of prompt {different[0]} differ: this is a bug, please report it")
    if different:
        view.print_line(
            f"The outputs of prompt {different[0]} differ: in {dtype} two tokens may tie, and a batch of another size "
            "may round to the other one. In float32 the outputs are equal (--dtype float32)."
        )


def _build_engines(
    texts: Sequence[str], settings: EngineSettings, report_progress: Callable[[str], None]
) -> tuple[list[list[int]], Callable[[list[int]], str], list[DemoEngine]]:
    """Returns the encoded prompts, a decode function, and one warmed-up engine per method."""
    import torch

    from peagle.checkpoints.target import encode_prompt
    from peagle.cli.demo_view import DemoEngine
    from peagle.engine.llm import LLM

    on_cpu = settings.device == "cpu" or (settings.device is None and not torch.cuda.is_available())
    if settings.dtype is None and on_cpu:
        settings = replace(settings, dtype="float32")
    engines = list[DemoEngine]()
    for name, drafter in METHODS:
        if drafter is not None:
            report_progress(f"loading {drafter} and timing decode steps")
        k = settings.num_speculative_tokens if drafter is not None else "auto"
        shared_target = engines[0].llm.target if engines else DEFAULT_TARGET
        llm = LLM(shared_target, drafter, **vars(replace(settings, num_speculative_tokens=k)))
        llm.max_in_flight_steps = 0  # a step returns its own tokens
        llm.generate([encode_prompt(llm.tokenizer, "Hello", raw=False)], SamplingParams(max_tokens=4))
        engines.append(DemoEngine(name, drafter, llm))
    tokenizer = engines[0].llm.tokenizer
    prompts = [encode_prompt(tokenizer, text, raw=False) for text in texts]
    return prompts, partial(tokenizer.decode, skip_special_tokens=True), engines
