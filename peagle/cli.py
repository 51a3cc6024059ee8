"""The command line: a verb a function, a flag a parameter.

Sees every room and is seen by none. Imports lazily, so that `peagle --help` is instant. A `UserError` becomes
one line and exit status 2; Ctrl-C leaves quietly.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle import __version__
from peagle.config import DEFAULT_DRAFT_TOKENS, VLLM_VERSION, SamplingParams, check_draft_tokens
from peagle.errors import UserError
from peagle.hub import DEFAULT_TARGET, resolve_drafter, resolve_target

if TYPE_CHECKING:
    from rich.console import Console

    from peagle.reference import Generation

DEMO_DRAFTER = "smollm2-135m-p-eagle"
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
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
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
    draft_tokens: DraftTokens = DEFAULT_DRAFT_TOKENS,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = SamplingParams.max_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = SamplingParams.temperature,
    top_k: Annotated[int, typer.Option(help="Sample among this many tokens; 0 is off.")] = SamplingParams.top_k,
    top_p: Annotated[float, typer.Option(help="Sample within this mass; 1 is off.")] = SamplingParams.top_p,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    dtype: Dtype = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, with a drafter's help if one is named; the answer is the same without it."""
    params = SamplingParams(max_tokens, temperature, top_k, top_p, seed, ignore_eos)
    if prompt == "-":
        prompt = _read_stdin()
    session = Session(target, drafter, draft_tokens, dtype, device, prompt, raw)
    started = time.perf_counter()
    out = session.run(params, speculate=drafter is not None, show=None if as_json else _console())
    seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps(session.as_json(out, seconds)))
    elif sys.stdout.isatty():
        _console(stderr=True).print(f"[dim]{_summary(out)}[/dim]")


@app.command(epilog=_examples("peagle demo", 'peagle demo "Tell me a story." -k 5 --max-tokens 100'))
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = DEMO_PROMPT,
    draft_tokens: DraftTokens = DEFAULT_DRAFT_TOKENS,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 64,
) -> None:
    """See speculation work: SmolLM2-135M answers without and with a P-EAGLE drafter, on the CPU."""
    from rich.table import Table

    console = _console()
    session = Session(DEFAULT_TARGET, DEMO_DRAFTER, draft_tokens, "float32", "cpu", prompt, raw=False)
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
        passes = 1 + len(out.rounds)
        counts = " ".join(map(str, out.accepted_per_position))
        table.add_row(name, str(passes), f"{len(out.token_ids) / passes:.2f}", f"{took:.1f}", counts)
    console.print(table)
    if plain.token_ids != fast.token_ids:
        raise UserError("the two texts differ: please report this, it must never happen")
    console.print(
        f"The two texts are equal, token for token ({len(fast.token_ids)} tokens): speculation changed "
        f"nothing but the number of passes, {1 + len(plain.rounds)} without and {1 + len(fast.rounds)} with it.",
        soft_wrap=not console.is_terminal,
    )


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
        draft_tokens: int,
        dtype: str,
        device: str,
        prompt: str,
        raw: bool,
    ) -> None:
        if not prompt.strip():
            raise UserError("the prompt is empty")
        if drafter is not None:
            check_draft_tokens(draft_tokens)
        target_folder = resolve_target(target)
        drafter_folder = resolve_drafter(drafter) if drafter is not None else None

        from peagle.checkpoints.drafter import check_fits, load_drafter, read_drafter_config
        from peagle.checkpoints.files import parse_device, parse_dtype
        from peagle.checkpoints.target import encode_prompt, load_target, load_tokenizer, read_target_config
        from peagle.reference import check_prompt

        # everything that can be wrong without the weights is found before they are read
        kind, where = parse_dtype(dtype), parse_device(device)
        cfg = read_target_config(target_folder)
        if drafter_folder is not None:
            check_fits(read_drafter_config(drafter_folder, cfg), cfg, drafter_folder)
        self.tokenizer = load_tokenizer(target_folder)
        self.prompt_ids = encode_prompt(self.tokenizer, prompt, raw)
        check_prompt(self.prompt_ids, cfg.vocab_size, cfg.max_positions)

        self.names = {"target": target, "drafter": drafter}
        self.draft_tokens = draft_tokens
        self.target = load_target(target_folder, kind, where)
        self.drafter = None
        if drafter_folder is not None:
            self.drafter = load_drafter(drafter_folder, self.target.model, kind, where)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def run(self, params: SamplingParams, speculate: bool, show: Console | None) -> Generation:
        """Generates; tokens appear on `show` as they come, accepted drafts shaded."""
        from rich.text import Text

        from peagle.display import DRAFTED, OWN, TokenText
        from peagle.reference import generate as reference_generate

        pieces = TokenText(self.text)

        def on_tokens(out: Generation, final: bool = False) -> None:
            if show is not None:
                for piece, drafted in pieces.feed(out.token_ids, out.drafted, final):
                    show.print(Text(piece, style=DRAFTED if drafted else OWN), end="", soft_wrap=True)

        out = reference_generate(
            self.target.model,
            self.prompt_ids,
            params,
            self.target.eos_ids,
            self.drafter if speculate else None,
            self.draft_tokens,
            on_tokens=on_tokens,
        )
        on_tokens(out, final=True)
        if show is not None:
            show.print()
        return out

    def as_json(self, out: Generation, seconds: float) -> dict[str, Any]:
        return {
            "text": self.text(out.token_ids),
            "token_ids": out.token_ids,
            "rounds": len(out.rounds),
            "accepted_per_position": out.accepted_per_position,
            "drafts": out.num_drafts,
            "acceptance_length": round(out.acceptance_length, 4),
            "drafted": out.drafted,
            "finish_reason": out.finish_reason,
            "prompt_tokens": len(out.prompt_ids),
            "draft_tokens": out.draft_tokens,
            "seconds": round(seconds, 3),
            **self.names,
        }


def _summary(out: Generation) -> str:
    said = f"{len(out.token_ids)} tokens in {1 + len(out.rounds)} passes of the target"
    if not out.draft_tokens:
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
