"""`chat`: a conversation in the terminal, accepted drafts shaded, with an engine in here or a server elsewhere.

Knows what a turn is and what a person may type; how tokens are made is known elsewhere.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from peagle.cli.answer import show_parts, summary
from peagle.cli.app import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    NumSpeculativeTokensOrAuto,
    TargetOption,
    app,
    console,
    examples,
    parse_num_speculative_tokens,
)
from peagle.config import DEFAULT_NUM_SPECULATIVE_TOKENS, SamplingParams
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_DRAFTER, DEFAULT_TARGET, resolve_drafter, resolve_target

if TYPE_CHECKING:
    from peagle.engine.request import CompletionOutput

LONGEST_ANSWER = 512
COMMANDS = {
    "/reset": "forget the conversation",
    "/k N": "at most N drafts a round",
    "/off": "no drafts: every token is the target's own",
    "/on": "drafts again",
    "/stats": "what the drafts brought so far",
    "/exit": "leave",
}
Parts = list[tuple[str, bool]]  # pieces of text, and whether each was a draft
Messages = list[dict[str, str]]


class Partner(Protocol):
    """Who answers. `output` is the last answer, also one that was stopped."""

    about: str
    most_drafts: int  # a round can have; 0 without a drafter
    output: CompletionOutput

    def answer(self, messages: Messages, params: SamplingParams) -> Iterator[Parts]: ...

    def stop(self) -> None:
        """Called from a signal's handler; the answer ends soon."""


@app.command(
    epilog=examples(
        "peagle chat",
        "peagle chat -t ./my-model -d ./my-drafter -k 5",
        "peagle chat --url http://localhost:8000",
        "printf 'Hello.\\nAnd again?\\n' | peagle chat",
    )
)
def chat(
    target: TargetOption = DEFAULT_TARGET,
    drafter: DrafterOption = None,
    draft_tokens: NumSpeculativeTokensOrAuto = str(DEFAULT_NUM_SPECULATIVE_TOKENS),
    url: Annotated[
        str | None, typer.Option(help="Talk with this running server instead; $OPENAI_API_KEY is sent.", metavar="URL")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = LONGEST_ANSWER,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = SamplingParams.temperature,
    top_p: Annotated[float, typer.Option(help="Sample within this mass; 1 is off.")] = SamplingParams.top_p,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest conversation, in tokens.", show_default="what the target can")
    ] = None,
) -> None:
    """Talk with a target in the terminal; drafts that it accepted are shaded. /help tells what can be typed.

    The built-in target comes with its drafter; any other drafts only with -d.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    k = parse_num_speculative_tokens(draft_tokens)
    partner: Partner
    if url is not None:
        from peagle.cli.chat_server import ServerBackend

        partner = ServerBackend(url)
    else:
        if drafter is None and target == DEFAULT_TARGET:
            drafter = DEFAULT_DRAFTER
        partner = Embedded(target, drafter, k, dtype, device, max_model_len)
    if url is not None and isinstance(k, int) and 0 < partner.most_drafts:
        params = replace(params, max_speculative_tokens=min(k, partner.most_drafts))
    Chat(partner, params, system).run()


class Embedded:
    """The engine in this process."""

    def __init__(
        self,
        target: str,
        drafter: str | None,
        draft_tokens: int | Literal["auto"],
        dtype: str,
        device: str,
        max_model_len: int | None,
    ) -> None:
        target_folder = resolve_target(target)
        drafter_folder = resolve_drafter(drafter) if drafter is not None else None

        from peagle.engine.llm import LLM

        options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": max_model_len}
        options |= {name: value for name, value in (("dtype", dtype), ("device", device)) if value != "auto"}
        self.llm = LLM(target_folder, drafter_folder, draft_tokens if drafter else "auto", **options)
        if not self.llm.has_tokenizer:
            raise UserError(f"--target {target}: has no tokenizer, so there is no text to talk in")
        self.llm.encode_chat([{"role": "user", "content": "Hello"}])  # a target without a chat template is refused here
        self.most_drafts = self.llm.scheduler.max_speculative_tokens if drafter is not None else 0
        self.about = target if drafter is None else f"{target} with {drafter}, {draft_tokens} drafts a round"
        self._stopped = False

    def answer(self, messages: Messages, params: SamplingParams) -> Iterator[Parts]:
        from peagle.display import TokenTextSplitter

        self._stopped = False
        group = self.llm.add_request(self.llm.encode_chat(messages), params, stream=True)
        shades, ids, drafted = TokenTextSplitter(self._decode), list[int](), list[bool]()
        try:
            for piece in self.llm.stream_group(group):
                ids += piece.token_ids
                drafted += piece.is_draft_token
                yield shades.feed(ids, drafted, piece.finish_reason is not None)
                if self._stopped:
                    break
        finally:
            self.llm.abort_group(group)
        self.output = self.llm.build_output(group).outputs[0]

    def _decode(self, ids: list[int]) -> str:
        return self.llm.tokenizer.decode(ids, skip_special_tokens=True)

    def stop(self) -> None:
        self._stopped = True


@dataclass(frozen=True)
class Answered:
    """An answer of the conversation, for its numbers."""

    output: CompletionOutput
    drafts: int  # that a round could have
    seconds: float


class Chat:
    """Turns, until somebody has had enough. Piped it is silent but for the answers, and ends at the first mistake."""

    def __init__(self, partner: Partner, params: SamplingParams, system: str | None) -> None:
        self.partner, self.params, self.system = partner, params, system
        self.screen, self.notes = console(), console(stderr=True)
        self.asks = sys.stdin.isatty()
        self.drafts = partner.most_drafts if params.max_speculative_tokens is None else params.max_speculative_tokens
        self.speculating = self.drafts > 0
        self.talk: Messages = []
        self.answered: list[Answered] = []
        self._pressed = False  # Ctrl-C, and nothing typed since

    def run(self) -> None:
        if self.asks:
            with suppress(ImportError):
                import readline  # noqa: F401  input() edits lines with it, and remembers them
            self._note(f"{self.partner.about}. /help tells what can be typed; Ctrl-C stops an answer, twice leaves.")
        while (line := self._read()) is not None:
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if self._command(line) == "leave":
                        return
                elif line:
                    self._turn(line.removeprefix("/") if line.startswith("//") else line)
            except UserError as error:
                if not self.asks:
                    raise
                self.notes.print(str(error), style="red", markup=False)

    def _read(self) -> str | None:
        """A line, or None at the end."""
        while True:
            try:
                if self.asks:
                    line = input("> " if sys.stdout.isatty() else "")
                elif not (line := sys.stdin.readline()):
                    return None
                self._pressed = False
                return line.strip()
            except EOFError:
                if sys.stdout.isatty():
                    self.screen.print()
                return None
            except KeyboardInterrupt:
                if not self.asks or self._pressed:
                    raise
                self._pressed = True
                self.screen.print()
                self._note("Ctrl-C again leaves, and so does /exit.")
            except UnicodeDecodeError:
                raise UserError("standard input is not valid UTF-8") from None

    def _turn(self, question: str) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": question}
        params = replace(self.params, max_speculative_tokens=self.drafts if self.speculating else 0)
        began = time.perf_counter()
        shown = False
        try:
            with self._stoppable():
                for parts in self.partner.answer([*system, *self.talk, asked], params):
                    show_parts(self.screen, parts)
                    shown = True
        finally:
            if shown:
                self.screen.print()
        seconds, out = time.perf_counter() - began, self.partner.output
        self.answered.append(Answered(out, self.drafts if self.speculating else 0, seconds))
        if out.text:
            self.talk += [asked, {"role": "assistant", "content": out.text}]
        if self.asks and self.screen.is_terminal:
            tried = replace(
                out, num_accepted_tokens_per_pos=out.num_accepted_tokens_per_pos[: self.answered[-1].drafts]
            )
            said = summary(tried, seconds) if out.token_ids else f"{seconds:.1f} s"
            self._note(
                said + {"length": "; cut at --max-tokens", "abort": "; stopped"}.get(out.finish_reason or "", "")
            )

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Ctrl-C ends the answer, between two steps of the engine; pressed again it ends the chat at once, as it
        does where nobody is there to ask something else."""

        def pressed(number: int, frame: Any) -> None:
            if self._pressed or not self.asks:
                raise KeyboardInterrupt
            self._pressed = True
            self.partner.stop()

        before = signal.signal(signal.SIGINT, pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _command(self, line: str) -> Literal["leave", "stay"]:
        name, *rest = line.split()
        if name in ("/exit", "/quit") and not rest:
            return "leave"
        if name == "/reset" and not rest:
            self.talk, self.answered = [], []
            self._note("A new conversation.")
        elif name == "/k":
            self._set_drafts(rest)
        elif name in ("/on", "/off") and not rest:
            if name == "/on":
                self._need_drafter(line)
            self.speculating = name == "/on"
            self._note(f"{self.drafts} drafts a round." if self.speculating else "No drafts.")
        elif name == "/stats" and not rest:
            for text in statistics(self.answered):
                self.screen.print(text, soft_wrap=True)
        elif name == "/help" and not rest:
            for command, meaning in COMMANDS.items():
                self.screen.print(f"  {command:<8} {meaning}")
        else:
            raise UserError(f"{line}: no such command; there are {', '.join(COMMANDS)} (a message may begin with //)")
        return "stay"

    def _set_drafts(self, given: list[str]) -> None:
        wanted = " ".join(["/k", *given])
        self._need_drafter(wanted)
        if len(given) != 1 or not given[0].isdecimal() or not 1 <= int(given[0]) <= self.partner.most_drafts:
            raise UserError(f"{wanted}: must be a number from 1 to {self.partner.most_drafts}, what -k made room for")
        self.drafts, self.speculating = int(given[0]), True
        self._note(f"{self.drafts} drafts a round.")

    def _need_drafter(self, command: str) -> None:
        if not self.partner.most_drafts:
            raise UserError(f"{command}: there is no drafter here; name one with -d")

    def _note(self, text: str) -> None:
        if self.asks:
            self.notes.print(text, style="dim", markup=False, soft_wrap=True)


def statistics(answered: list[Answered]) -> list[str]:
    """A round is a pass of the target behind the prompt's own, which brings the first token."""
    counted = [one for one in answered if one.output.token_ids]
    if not counted:
        return ["No answers yet." if not answered else "This server does not tell its tokens."]
    outs = [one.output for one in counted]
    tokens, rounds = sum(len(out.token_ids) for out in outs), sum(out.num_decode_steps for out in outs)
    speed = tokens / sum(one.seconds for one in counted)
    lines = [
        f"{len(outs)} {'answer' if len(outs) == 1 else 'answers'}: {tokens} tokens in {rounds} rounds, "
        f"{speed:.1f} tokens/s; {max(0, tokens - len(outs) - rounds)} rounds saved"
    ]
    helped = [one for one in counted if one.output.num_drafts]
    if helped:
        drafts = sum(one.output.num_drafts for one in helped)
        accepted = sum(sum(one.output.num_accepted_tokens_per_pos) for one in helped)
        rates = []
        for i in range(max(one.drafts for one in helped)):
            could = [one.output for one in helped if one.drafts > i]
            rates.append(
                sum(out.num_accepted_tokens_per_pos[i] for out in could) / sum(out.num_drafts for out in could)
            )
        by_position = " ".join(f"{rate:.0%}" for rate in rates)
        lines.append(f"acceptance length {1 + accepted / drafts:.2f}; drafts accepted by position: {by_position}")
    return lines
