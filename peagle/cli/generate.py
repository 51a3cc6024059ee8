"""`peagle generate`: generates the response to one prompt."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.cli.app import (
    OUTPUT_PANEL,
    SAMPLING_PANEL,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    MaxModelLen,
    NumSpeculativeTokensOrAuto,
    TargetOption,
    app,
    console,
    examples,
    parse_num_speculative_tokens,
)
from peagle.config import DEFAULT_NUM_SPECULATIVE_TOKENS, SamplingParams
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET, resolve_drafter, resolve_target

if TYPE_CHECKING:
    from rich.console import Console

    from peagle.engine.request import CompletionOutput

TextParts = list[tuple[str, bool]]  # text, and whether it comes from an accepted draft token

MaxTokens = Annotated[int, typer.Option(help="Maximum number of output tokens.", rich_help_panel=SAMPLING_PANEL)]
Temperature = Annotated[float, typer.Option(help="Temperature; 0 is greedy.", rich_help_panel=SAMPLING_PANEL)]
TopP = Annotated[float, typer.Option(help="Top-p sampling; 1 is off.", rich_help_panel=SAMPLING_PANEL)]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.", rich_help_panel=SAMPLING_PANEL)]


@app.command(
    epilog=examples(
        'peagle generate "Why is the sky blue?"',
        'peagle generate "Why is the sky blue?" -d smollm2-135m-p-eagle -k 7',
        "cat prompt.txt | peagle generate - --raw --json",
    )
)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = None,
    num_speculative_tokens: NumSpeculativeTokensOrAuto = str(DEFAULT_NUM_SPECULATIVE_TOKENS),
    raw: Annotated[
        bool, typer.Option("--raw", help="Use the prompt without the chat template.", rich_help_panel=SAMPLING_PANEL)
    ] = False,
    max_tokens: MaxTokens = SamplingParams.max_tokens,
    min_tokens: Annotated[
        int, typer.Option(help="Minimum number of output tokens.", rich_help_panel=SAMPLING_PANEL)
    ] = SamplingParams.min_tokens,
    temperature: Temperature = SamplingParams.temperature,
    top_k: Annotated[
        int, typer.Option(help="Top-k sampling; 0 is off.", rich_help_panel=SAMPLING_PANEL)
    ] = SamplingParams.top_k,
    top_p: TopP = SamplingParams.top_p,
    min_p: Annotated[
        float,
        typer.Option(help="Minimum probability relative to the top token; 0 is off.", rich_help_panel=SAMPLING_PANEL),
    ] = SamplingParams.min_p,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; repeatable.", rich_help_panel=SAMPLING_PANEL)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate to --max-tokens.", rich_help_panel=SAMPLING_PANEL)
    ] = False,
    presence_penalty: Annotated[
        float, typer.Option(help="Penalty on tokens in the output.", rich_help_panel=SAMPLING_PANEL)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Penalty per occurrence of a token in the output.", rich_help_panel=SAMPLING_PANEL)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Penalty on tokens in prompt and output; 1 is off.", rich_help_panel=SAMPLING_PANEL)
    ] = 1.0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    max_model_len: MaxModelLen = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: alternatives per token.", rich_help_panel=OUTPUT_PANEL)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate the response to a prompt, with speculative decoding if there is a drafter.

    The output is the same with and without a drafter.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    if prompt == "-":
        prompt = _read_stdin()
    k = parse_num_speculative_tokens(num_speculative_tokens)
    prompt_token_ids = check_prompt_text(prompt, target, drafter, raw, max_model_len)
    engine = EmbeddedEngine(target, drafter, k, dtype, device, max_model_len)
    screen = None if as_json else console()
    started = time.perf_counter()
    for parts in engine.stream(prompt_token_ids, params):
        if screen is not None:
            print_parts(screen, parts)
    seconds = time.perf_counter() - started
    if screen is not None:
        screen.print()
    if as_json:
        names = {"target": target, "drafter": drafter}
        print(json.dumps(_describe_output(engine.output, len(prompt_token_ids), seconds) | names))
    elif sys.stdout.isatty():
        console(stderr=True).print(f"[dim]{summarize_output(engine.output, seconds)}[/dim]")


def check_prompt_text(prompt: str, target: str, drafter: str | None, raw: bool, max_model_len: int | None) -> list[int]:
    """Encodes the prompt and checks everything that does not need the weights, before they are loaded."""
    if not prompt.strip():
        raise UserError("the prompt is empty")
    target_folder = resolve_target(target)
    drafter_folder = resolve_drafter(drafter) if drafter is not None else None

    from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config
    from peagle.checkpoints.target import encode_prompt, load_tokenizer, read_target_config
    from peagle.speculative.reference import check_prompt

    cfg = read_target_config(target_folder)
    if drafter_folder is not None:
        check_drafter_fits(read_drafter_config(drafter_folder, cfg), cfg, drafter_folder)
    prompt_token_ids = encode_prompt(load_tokenizer(target_folder), prompt, raw)
    check_prompt(prompt_token_ids, cfg.vocab_size, min(max_model_len or cfg.max_positions, cfg.max_positions))
    return prompt_token_ids


class EmbeddedEngine:
    """The engine in this process, for one request at a time. `output` is the last completion, also a stopped one."""

    def __init__(
        self,
        target: str,
        drafter: str | None,
        num_speculative_tokens: int | Literal["auto"],
        dtype: str,
        device: str,
        max_model_len: int | None,
    ) -> None:
        target_folder = resolve_target(target)
        drafter_folder = resolve_drafter(drafter) if drafter is not None else None

        from peagle.engine.llm import LLM

        options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": max_model_len}
        options |= {name: value for name, value in (("dtype", dtype), ("device", device)) if value != "auto"}
        self.llm = LLM(target_folder, drafter_folder, num_speculative_tokens if drafter else "auto", **options)
        self.output: CompletionOutput
        self._stopped = False

    def stream(self, prompt_token_ids: list[int], params: SamplingParams) -> Iterator[TextParts]:
        """Yields the new text after every engine step."""
        from peagle.display import TokenTextSplitter

        self._stopped = False
        splitter, num_chars = TokenTextSplitter(self._decode), 0
        with closing(self.llm.stream(prompt_token_ids, params)) as outputs:
            for out in outputs:
                self.output = out
                if params.stop:  # only the engine's text is cut at the right place
                    yield [(out.text[num_chars:], False)]
                    num_chars = max(num_chars, len(out.text))
                else:
                    yield splitter.add_tokens(out.token_ids, out.is_draft_token, out.finish_reason is not None)
                if self._stopped:
                    out.finish_reason = out.finish_reason or "abort"
                    break

    def stop(self) -> None:
        """Ends the stream after the current step. A signal handler may call it."""
        self._stopped = True

    def _decode(self, token_ids: list[int]) -> str:
        return self.llm.tokenizer.decode(token_ids, skip_special_tokens=True)


def _describe_output(output: CompletionOutput, num_prompt_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "is_draft_token": output.is_draft_token,
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": num_prompt_tokens,
        "num_speculative_tokens": len(output.num_accepted_tokens_per_pos),
        "num_decode_steps": output.num_decode_steps,
        "num_drafts": output.num_drafts,
        "num_accepted_tokens_per_pos": output.num_accepted_tokens_per_pos,
        "acceptance_length": round(output.acceptance_length, 4),
        "seconds": round(seconds, 3),
        **({"logprobs": output.logprobs} if output.logprobs is not None else {}),
    }


def print_parts(screen: Console, parts: TextParts) -> None:
    """Prints text, with accepted draft tokens shaded."""
    from rich.text import Text

    from peagle.display import DRAFT_STYLE, TARGET_STYLE

    for text, is_draft_token in parts:
        screen.print(Text(text, style=DRAFT_STYLE if is_draft_token else TARGET_STYLE), end="", soft_wrap=True)


def summarize_output(output: CompletionOutput, seconds: float) -> str:
    text = f"{len(output.token_ids)} tokens in {1 + output.num_decode_steps} forward passes, {seconds:.1f} s"
    if not output.num_accepted_tokens_per_pos:
        return text
    counts = " ".join(map(str, output.num_accepted_tokens_per_pos))
    return f"{text}; acceptance length {output.acceptance_length:.2f}; accepted draft tokens by position: {counts}"


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("standard input is not valid UTF-8") from None
