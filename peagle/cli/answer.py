"""`generate`: a prompt in, an answer out, with a drafter's help or without.

Knows nothing about how it is generated.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.cli.app import (
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


@app.command(
    epilog=examples(
        'peagle generate "Why is the sky blue?"',
        'peagle generate "Why is the sky blue?" -d smollm2-135m-p-eagle -k 7',
        "cat prompt.txt | peagle generate - --raw --json",
    )
)
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = None,
    draft_tokens: NumSpeculativeTokensOrAuto = str(DEFAULT_NUM_SPECULATIVE_TOKENS),
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = SamplingParams.max_tokens,
    min_tokens: Annotated[int, typer.Option(help="Shortest answer.")] = SamplingParams.min_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = SamplingParams.temperature,
    top_k: Annotated[int, typer.Option(help="Sample among this many tokens; 0 is off.")] = SamplingParams.top_k,
    top_p: Annotated[float, typer.Option(help="Sample within this mass; 1 is off.")] = SamplingParams.top_p,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens this much less likely than the best; 0 is off.")
    ] = SamplingParams.min_p,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given again.")] = None,
    presence_penalty: Annotated[float, typer.Option(help="On tokens already said.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="On tokens, for each time they were said.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Divides what prompt and answer hold; 1 is off.")] = 1.0,
    logprobs: Annotated[int | None, typer.Option(help="With --json: so many alternatives a token.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_model_len: MaxModelLen = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt, with a drafter's help if one is named; the answer is the same without it."""
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
    session = Session(
        target, drafter, parse_num_speculative_tokens(draft_tokens), dtype, device, prompt, raw, max_model_len
    )
    started = time.perf_counter()
    out = session.run(params, show=None if as_json else console())
    seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps(session.as_json(out, seconds)))
    elif sys.stdout.isatty():
        console(stderr=True).print(f"[dim]{summary(out, seconds)}[/dim]")


class Session:
    """A target, maybe a drafter, and a prompt."""

    def __init__(
        self,
        target: str,
        drafter: str | None,
        draft_tokens: int | Literal["auto"],
        dtype: str,
        device: str,
        prompt: str,
        raw: bool,
        max_model_len: int | None = None,
    ) -> None:
        if not prompt.strip():
            raise UserError("the prompt is empty")
        target_folder = resolve_target(target)
        drafter_folder = resolve_drafter(drafter) if drafter is not None else None

        from peagle.checkpoints.drafter import check_drafter_fits, read_drafter_config
        from peagle.checkpoints.target import encode_prompt, load_tokenizer, read_target_config
        from peagle.engine.llm import LLM
        from peagle.speculative.reference import check_prompt

        # everything that can be wrong without the weights is found before they are read
        cfg = read_target_config(target_folder)
        if drafter_folder is not None:
            check_drafter_fits(read_drafter_config(drafter_folder, cfg), cfg, drafter_folder)
        self.tokenizer = load_tokenizer(target_folder)
        self.prompt_ids = encode_prompt(self.tokenizer, prompt, raw)
        check_prompt(self.prompt_ids, cfg.vocab_size, min(max_model_len or cfg.max_positions, cfg.max_positions))

        self.names = {"target": target, "drafter": drafter}
        options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": max_model_len}
        options |= {name: value for name, value in (("dtype", dtype), ("device", device)) if value != "auto"}
        self.llm = LLM(target_folder, drafter_folder, draft_tokens if drafter else "auto", **options)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def run(self, params: SamplingParams, show: Console | None) -> CompletionOutput:
        """Generates; tokens appear on `show` as they come, accepted drafts shaded."""
        from peagle.display import TokenTextSplitter

        llm = self.llm
        group = llm.add_request(self.prompt_ids, params, stream=True)
        shades, ids, drafted = TokenTextSplitter(self.text), list[int](), list[bool]()
        for piece in llm.stream_group(group):
            ids += piece.token_ids
            drafted += piece.is_draft_token
            final = piece.finish_reason is not None
            # with stop strings only the text knows how far it may be shown
            parts = [(piece.text, False)] if params.stop else shades.feed(ids, drafted, final)
            if show is not None:
                show_parts(show, parts)
        if show is not None:
            show.print()
        return llm.build_output(group).outputs[0]

    def as_json(self, out: CompletionOutput, seconds: float) -> dict[str, Any]:
        return {
            "text": out.text,
            "token_ids": out.token_ids,
            "rounds": out.num_decode_steps,
            "num_accepted_tokens_per_pos": out.num_accepted_tokens_per_pos,
            "drafts": out.num_drafts,
            "acceptance_length": round(out.acceptance_length, 4),
            "drafted": out.is_draft_token,
            "finish_reason": out.finish_reason,
            "prompt_tokens": len(self.prompt_ids),
            "draft_tokens": len(out.num_accepted_tokens_per_pos),
            "seconds": round(seconds, 3),
            **({"logprobs": out.logprobs} if out.logprobs is not None else {}),
            **self.names,
        }


def show_parts(show: Console, parts: list[tuple[str, bool]]) -> None:
    """Pieces of text behind what is there, those that were drafts shaded."""
    from rich.text import Text

    from peagle.display import DRAFTED, OWN

    for text, was_draft in parts:
        show.print(Text(text, style=DRAFTED if was_draft else OWN), end="", soft_wrap=True)


def summary(out: CompletionOutput, seconds: float) -> str:
    said = f"{len(out.token_ids)} tokens in {1 + out.num_decode_steps} passes of the target, {seconds:.1f} s"
    if not out.num_accepted_tokens_per_pos:
        return said
    counts = " ".join(map(str, out.num_accepted_tokens_per_pos))
    return f"{said}; {out.acceptance_length:.2f} tokens a round; drafts accepted by position: {counts}"


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("standard input is not valid UTF-8") from None
