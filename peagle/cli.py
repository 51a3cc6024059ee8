"""The command line: a verb a function, a flag a parameter.

Sees every room and is seen by none. Imports lazily, so that `peagle --help` is instant. A `UserError` becomes
one line and exit status 2; Ctrl-C leaves quietly.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle import __version__
from peagle.config import DEFAULT_DRAFT_TOKENS, VLLM_VERSION, SamplingParams, check_draft_tokens
from peagle.errors import UserError
from peagle.hub import DEFAULT_TARGET, resolve_drafter, resolve_target

if TYPE_CHECKING:
    from rich.console import Console

    from peagle.engine.request import CompletionOutput

DEMO_DRAFTER = "smollm2-135m-p-eagle"
DEMO_CONTEXT = 2048  # tokens; the cache is made for no more
DEMO_PROMPT = "Write a Python function that returns the n-th Fibonacci number."

app = typer.Typer(
    name="peagle",
    help="Parallel speculative decoding: a P-EAGLE drafter for your model, its worth, and serving with it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Target = Annotated[
    str, typer.Option("--target", "-t", help="A folder, a hub id, or the built-in smollm2-135m.", metavar="T")
]
MaybeDrafter = Annotated[
    str | None, typer.Option("--drafter", "-d", help="A drafter's folder, hub id or built-in name.", metavar="D")
]
DraftTokens = Annotated[int, typer.Option("-k", "--draft-tokens", help="Draft tokens a round.")]
DraftTokensOrAuto = Annotated[
    str, typer.Option("-k", "--draft-tokens", help="Draft tokens a round; auto follows the load.", metavar="K")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: what is fast on the device.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto: a GPU where there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"peagle {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(
    epilog=_examples(
        'peagle generate "Why is the sky blue?"',
        'peagle generate "Why is the sky blue?" -d smollm2-135m-p-eagle -k 7',
        "cat prompt.txt | peagle generate - --raw --json",
    )
)
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    target: Target = DEFAULT_TARGET,
    drafter: MaybeDrafter = None,
    draft_tokens: DraftTokensOrAuto = str(DEFAULT_DRAFT_TOKENS),
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
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and answer together.", show_default="what the target can")
    ] = None,
    as_json: AsJson = False,
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
    session = Session(target, drafter, _draft_tokens(draft_tokens), dtype, device, prompt, raw, max_model_len)
    started = time.perf_counter()
    out = session.run(params, speculate=drafter is not None, show=None if as_json else _console())
    seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps(session.as_json(out, seconds)))
    elif sys.stdout.isatty():
        _console(stderr=True).print(f"[dim]{_summary(out, seconds)}[/dim]")


def _draft_tokens(given: str) -> int | Literal["auto"]:
    if given == "auto":
        return "auto"
    try:
        return check_draft_tokens(int(given))
    except ValueError:
        raise UserError(f"-k {given}: must be a number of draft tokens, or auto") from None


@app.command(epilog=_examples("peagle demo", 'peagle demo "Tell me a story." -k 5 --max-tokens 100'))
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = DEMO_PROMPT,
    draft_tokens: DraftTokens = DEFAULT_DRAFT_TOKENS,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 64,
) -> None:
    """See speculation work: SmolLM2-135M answers without and with a P-EAGLE drafter, on the CPU."""
    from rich.table import Table

    console = _console()
    session = Session(
        DEFAULT_TARGET, DEMO_DRAFTER, check_draft_tokens(draft_tokens), "float32", "cpu", prompt, False, DEMO_CONTEXT
    )
    params = SamplingParams(max_tokens=max_tokens)
    runs, seconds = [], []
    for title, speculate in [
        ("SmolLM2-135M alone: one token a pass", False),
        (f"with a P-EAGLE drafter, {draft_tokens} drafts a round: accepted drafts are shaded", True),
    ]:
        console.rule(f"[bold]{title}")
        started = time.perf_counter()
        runs.append(session.run(params, speculate, show=console))
        seconds.append(time.perf_counter() - started)
        console.print()
    plain, fast = runs
    table = Table("", "passes of the target", "tokens a pass", "seconds", "drafts accepted, by position")
    for name, out, took in zip(("alone", "with drafter"), runs, seconds, strict=True):
        passes = 1 + out.rounds
        counts = " ".join(map(str, out.accepted_per_position))
        table.add_row(name, str(passes), f"{len(out.token_ids) / passes:.2f}", f"{took:.1f}", counts)
    console.print(table)
    if plain.token_ids != fast.token_ids:
        raise UserError("the two texts differ: please report this, it must never happen")
    console.print(
        f"The two texts are equal, token for token ({len(fast.token_ids)} tokens): speculation changed "
        f"nothing but the number of passes, {1 + plain.rounds} without and {1 + fast.rounds} with it.",
        soft_wrap=not console.is_terminal,
    )


@app.command(
    epilog=_examples(
        "peagle tune -d smollm2-135m-p-eagle", "peagle tune -t TARGET -d DRAFTER --rates 0.7,0.5,0.35 --out costs.json"
    )
)
def tune(
    drafter: Annotated[str, typer.Option("--drafter", "-d", help="A drafter's folder, hub id or name.", metavar="D")],
    target: Target = DEFAULT_TARGET,
    rates: Annotated[
        str | None,
        typer.Option(help="How often draft 1, 2, .. is accepted, all before it included.", show_default="a guess"),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="The most requests at once.")] = 64,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt and answer together.")] = 2048,
    dtype: Dtype = "auto",
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Keep the table, for LLM(cost_table=...).")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a round costs here, by requests at once and drafts, and say how many drafts pay when."""
    from peagle.engine.llm import LLM

    options = {name: value for name, value in (("dtype", dtype), ("device", device)) if value != "auto"}
    llm = LLM(target, drafter, "auto", max_num_seqs=max_num_seqs, max_model_len=max_model_len, **options)
    count, table = llm.draft_count, llm.draft_count.table
    if rates is not None:
        count.acceptance.assume(_rates(rates))
    best = {batch: max(count.choices, key=lambda k: count.tokens_per_second(batch, k)) for batch in table.batches}
    about = {"target": target, "drafter": drafter, "device": str(llm.runner.device)}
    if out is not None:
        table.save(out, **about)
    if as_json:
        rows = [{"batch": b, "drafts": k, "ms": round(s * 1e3, 4)} for (b, k), s in sorted(table.seconds.items())]
        print(json.dumps({**about, "rounds": rows, "best": best, "rates": count.acceptance.rates}))
        return
    from rich.table import Table

    shown = Table("batch", *(f"K={k}" for k in count.choices), "best K", "tokens/s", title="milliseconds of a round")
    for batch in table.batches:
        costs = [table.seconds.get((batch, k)) for k in count.choices]
        cells = [f"{s * 1e3:.2f}" if s is not None else "-" for s in costs]
        shown.add_row(str(batch), *cells, str(best[batch]), f"{count.tokens_per_second(batch, best[batch]):,.0f}")
    _console().print(shown)
    assumed = ", ".join(f"{r:.2f}" for r in count.acceptance.rates)
    print(f"for acceptance by position {assumed}" + ("" if rates else " (a guess: give --rates)"))
    if out is not None:
        print(f"wrote {out}")


def _rates(given: str) -> list[float]:
    try:
        rates = [float(r) for r in given.split(",")]
    except ValueError:
        raise UserError(f"--rates {given}: must be numbers between 0 and 1, by commas") from None
    if not all(0 <= b <= a <= 1 for a, b in zip([1.0, *rates], rates, strict=False)):
        raise UserError(f"--rates {given}: must be between 0 and 1, none larger than the one before it")
    return rates


@app.command(
    epilog=_examples("peagle inspect DIR --target T", "peagle inspect DIR -t T --vllm 0.26 --json"),
)
def inspect(
    folder: Annotated[str, typer.Argument(help="A drafter's folder, hub id or built-in name.", metavar="DIR")],
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="The target it drafts for; checks the fit too.")
    ] = None,
    draft_tokens: Annotated[int | None, typer.Option("-k", "--draft-tokens", help="For the vllm serve line.")] = None,
    vllm: Annotated[str, typer.Option(help="The vLLM version it shall run on.", metavar="VERSION")] = VLLM_VERSION,
    as_json: AsJson = False,
) -> None:
    """Say what a drafter's folder holds and what is wrong with it; exit status 1 if anything is."""
    from peagle.checkpoints.validate import inspect_drafter

    target_folder = resolve_target(target) if target is not None else None
    report = inspect_drafter(resolve_drafter(folder), folder, target_folder, target, vllm, draft_tokens)
    if as_json:
        print(json.dumps({"facts": report.facts, "serve": report.serve, "findings": report.findings}))
    else:
        width = max(map(len, report.facts))
        for label, fact in report.facts.items():
            print(f"{label:<{width}}  {fact}")
        print(f"{'serve':<{width}}  {report.serve}")
        for finding in report.findings:
            print(f"FOUND  {finding}")
        if not report.findings:
            print("ok: nothing found")
    if report.findings:
        raise typer.Exit(1)


@app.command(
    epilog=_examples(
        "peagle convert DIR OUT --to speculators --target T", "peagle convert DIR OUT --to plain --target T"
    )
)
def convert(
    folder: Annotated[str, typer.Argument(help="A drafter's folder, hub id or built-in name.", metavar="DIR")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    to: Annotated[str, typer.Option(help="plain (vLLM's own) or speculators.")],
    target: Target,
    draft_tokens: DraftTokens = DEFAULT_DRAFT_TOKENS,
) -> None:
    """Write a drafter in the other format; every tensor stays as it is, bit for bit."""
    from peagle.checkpoints.convert import convert as convert_folder
    from peagle.checkpoints.convert import format_of

    if to not in ("plain", "speculators"):
        raise UserError(f"--to {to}: must be plain or speculators")
    source = resolve_drafter(folder)
    if format_of(source) == to:
        raise UserError(f"{folder}: is in the {to} format already")
    fate = convert_folder(source, out, to, resolve_target(target), target, check_draft_tokens(draft_tokens))  # type: ignore[arg-type]
    print(f"wrote {out} in the {to} format")
    for name, what in fate.items():
        print(f"  {name}: {what}")


class Session:
    """A target, maybe a drafter, and a prompt, loaded once for one or two runs."""

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

        from peagle.checkpoints.drafter import check_fits, read_drafter_config
        from peagle.checkpoints.target import encode_prompt, load_tokenizer, read_target_config
        from peagle.engine.llm import LLM
        from peagle.reference import check_prompt

        # everything that can be wrong without the weights is found before they are read
        cfg = read_target_config(target_folder)
        if drafter_folder is not None:
            check_fits(read_drafter_config(drafter_folder, cfg), cfg, drafter_folder)
        self.tokenizer = load_tokenizer(target_folder)
        self.prompt_ids = encode_prompt(self.tokenizer, prompt, raw)
        check_prompt(self.prompt_ids, cfg.vocab_size, min(max_model_len or cfg.max_positions, cfg.max_positions))

        self.names = {"target": target, "drafter": drafter}
        options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": max_model_len}
        options |= {name: value for name, value in (("dtype", dtype), ("device", device)) if value != "auto"}
        self.alone = self.helped = LLM(target_folder, drafter_folder, draft_tokens if drafter else "auto", **options)
        if drafter is not None:
            self.alone = LLM(self.helped.target, None, **options)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def run(self, params: SamplingParams, speculate: bool, show: Console | None) -> CompletionOutput:
        """Generates; tokens appear on `show` as they come, accepted drafts shaded."""
        from rich.text import Text

        from peagle.display import DRAFTED, OWN, TokenText

        llm = self.helped if speculate else self.alone
        group = llm.add(self.prompt_ids, params, stream=True)
        shades, ids, drafted = TokenText(self.text), list[int](), list[bool]()
        for piece in llm.follow(group):
            ids += piece.token_ids
            drafted += piece.drafted
            final = piece.finish_reason is not None
            # with stop strings only the text knows how far it may be shown
            parts = [(piece.text, False)] if params.stop else shades.feed(ids, drafted, final)
            for text, was_draft in parts:
                if show is not None:
                    show.print(Text(text, style=DRAFTED if was_draft else OWN), end="", soft_wrap=True)
        if show is not None:
            show.print()
        return llm.output(group).outputs[0]

    def as_json(self, out: CompletionOutput, seconds: float) -> dict[str, Any]:
        return {
            "text": out.text,
            "token_ids": out.token_ids,
            "rounds": out.rounds,
            "accepted_per_position": out.accepted_per_position,
            "drafts": out.num_drafts,
            "acceptance_length": round(out.acceptance_length, 4),
            "drafted": out.drafted,
            "finish_reason": out.finish_reason,
            "prompt_tokens": len(self.prompt_ids),
            "draft_tokens": len(out.accepted_per_position),
            "seconds": round(seconds, 3),
            **({"logprobs": out.logprobs} if out.logprobs is not None else {}),
            **self.names,
        }


def _summary(out: CompletionOutput, seconds: float) -> str:
    said = f"{len(out.token_ids)} tokens in {1 + out.rounds} passes of the target, {seconds:.1f} s"
    if not out.accepted_per_position:
        return said
    counts = " ".join(map(str, out.accepted_per_position))
    return f"{said}; {out.acceptance_length:.2f} tokens a round; drafts accepted by position: {counts}"


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=True)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("standard input is not valid UTF-8") from None


def main() -> None:
    try:
        status = typer.main.get_command(app).main(standalone_mode=False, prog_name="peagle")
    except UserError as error:
        status = _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):  # typer turns the one into the other
        status = 130
    except BrokenPipeError:
        sys.stderr.close()
        status = 141
    except Exception as error:
        # typer's own complaints about flags; its exception classes have moved between versions
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if message.startswith("Usage:"):  # called without a verb: its complaint is the help text
            print(message)
            status = 2
        else:
            context = getattr(error, "ctx", None)
            where = context.command_path if context is not None else "peagle"
            status = _complain(f"{message.rstrip('.')} (see {where} --help)")
    sys.exit(status or 0)


def _complain(message: str) -> int:
    print(f"peagle: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
