"""`peagle chat`: a conversation in the terminal, with the engine in this process or with a running server."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from peagle.cli.app import (
    MODEL_PANEL,
    SAMPLING_PANEL,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    MaxModelLen,
    NumSpeculativeTokensOrAuto,
    TargetOption,
    app,
    console,
    examples,
    parse_num_speculative_tokens,
)
from peagle.cli.generate import (
    EmbeddedEngine,
    MaxTokens,
    Seed,
    Temperature,
    TextParts,
    TopP,
    print_parts,
    summarize_output,
)
from peagle.config import DEFAULT_NUM_SPECULATIVE_TOKENS, SamplingParams
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_DRAFTER, DEFAULT_TARGET

if TYPE_CHECKING:
    from peagle.engine.request import CompletionOutput

DEFAULT_MAX_TOKENS = 512
COMMANDS = {
    "/reset": "start a new conversation",
    "/k N": "use at most N draft tokens per decode step",
    "/off": "turn speculative decoding off",
    "/on": "turn speculative decoding on",
    "/stats": "show the acceptance statistics of the conversation",
    "/exit": "leave",
}
ChatMessages = list[dict[str, str]]


class ChatBackend(Protocol):
    """Generates the responses. `output` is the last response, also a stopped one."""

    description: str
    max_speculative_tokens: int  # 0 without a drafter

    @property
    def output(self) -> CompletionOutput: ...

    def respond(self, messages: ChatMessages, params: SamplingParams) -> Iterator[TextParts]: ...

    def stop(self) -> None:
        """Ends the response soon. Called from a signal handler."""


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
    num_speculative_tokens: NumSpeculativeTokensOrAuto = str(DEFAULT_NUM_SPECULATIVE_TOKENS),
    url: Annotated[
        str | None,
        typer.Option(
            help="Use this running server instead; $OPENAI_API_KEY is sent.", metavar="URL", rich_help_panel=MODEL_PANEL
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.", rich_help_panel=SAMPLING_PANEL)] = None,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = SamplingParams.temperature,
    top_p: TopP = SamplingParams.top_p,
    seed: Seed = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    max_model_len: MaxModelLen = None,
) -> None:
    """Chat with a model in the terminal; accepted draft tokens are shaded. Type /help for the commands.

    The default target has a default drafter; other targets use speculative decoding only with -d.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    k = parse_num_speculative_tokens(num_speculative_tokens)
    backend: ChatBackend
    if url is not None:
        from peagle.cli.chat_server import ServerBackend

        backend = ServerBackend(url)
        if isinstance(k, int) and backend.max_speculative_tokens > 0:
            params = replace(params, max_speculative_tokens=min(k, backend.max_speculative_tokens))
    else:
        if drafter is None and target == DEFAULT_TARGET:
            drafter = DEFAULT_DRAFTER
        backend = EmbeddedBackend(target, drafter, k, dtype, device, max_model_len)
    ChatSession(backend, params, system).run()


class EmbeddedBackend:
    """The engine in this process."""

    def __init__(
        self,
        target: str,
        drafter: str | None,
        num_speculative_tokens: int | Literal["auto"],
        dtype: str,
        device: str,
        max_model_len: int | None,
    ) -> None:
        self.engine = EmbeddedEngine(target, drafter, num_speculative_tokens, dtype, device, max_model_len)
        llm = self.engine.llm
        if not llm.has_tokenizer:
            raise UserError(f"--target {target}: has no tokenizer, which a chat needs")
        llm.encode_chat([{"role": "user", "content": "Hello"}])  # raises if there is no chat template
        self.max_speculative_tokens = llm.scheduler.max_speculative_tokens if drafter is not None else 0
        self.description = target if drafter is None else f"{target} with {drafter}, K {num_speculative_tokens}"

    @property
    def output(self) -> CompletionOutput:
        return self.engine.output

    def respond(self, messages: ChatMessages, params: SamplingParams) -> Iterator[TextParts]:
        return self.engine.stream(self.engine.llm.encode_chat(messages), params)

    def stop(self) -> None:
        self.engine.stop()


@dataclass(frozen=True)
class ChatResponse:
    """A response of the conversation, for its statistics."""

    output: CompletionOutput
    num_speculative_tokens: int
    seconds: float


class ChatSession:
    """The turns of a conversation. With piped input it prints only the responses, and ends at the first error."""

    def __init__(self, backend: ChatBackend, params: SamplingParams, system: str | None) -> None:
        self.backend, self.params, self.system = backend, params, system
        self.screen, self.notices = console(), console(stderr=True)
        self.interactive = sys.stdin.isatty()
        k = params.max_speculative_tokens
        self.num_speculative_tokens = backend.max_speculative_tokens if k is None else k
        self.speculation_enabled = self.num_speculative_tokens > 0
        self.messages: ChatMessages = []
        self.responses: list[ChatResponse] = []
        self._interrupted = False  # Ctrl-C was pressed since the last line

    def run(self) -> None:
        if self.interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  input() uses it for line editing and history
            self._print_notice(
                f"{self.backend.description}. Type /help for commands. Ctrl-C stops a response; twice, it leaves."
            )
        while (line := self._read_line()) is not None:
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if self._run_command(line) == "leave":
                        return
                elif line:
                    self._run_turn(line.removeprefix("/") if line.startswith("//") else line)
            except UserError as error:
                if not self.interactive:
                    raise
                self.notices.print(str(error), style="red", markup=False)

    def _read_line(self) -> str | None:
        """Returns None at the end of the input."""
        while True:
            try:
                if self.interactive:
                    line = input("> " if sys.stdout.isatty() else "")
                elif not (line := sys.stdin.readline()):
                    return None
                self._interrupted = False
                return line.strip()
            except EOFError:
                if sys.stdout.isatty():
                    self.screen.print()
                return None
            except KeyboardInterrupt:
                if not self.interactive or self._interrupted:
                    raise
                self._interrupted = True
                self.screen.print()
                self._print_notice("Press Ctrl-C again to leave, or type /exit.")
            except UnicodeDecodeError:
                raise UserError("standard input is not valid UTF-8") from None

    def _run_turn(self, text: str) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        message = {"role": "user", "content": text}
        k = self.num_speculative_tokens if self.speculation_enabled else 0
        params = replace(self.params, max_speculative_tokens=k)
        started = time.perf_counter()
        printed = False
        try:
            with self._handle_interrupts():
                for parts in self.backend.respond([*system, *self.messages, message], params):
                    print_parts(self.screen, parts)
                    printed = True
        finally:
            if printed:
                self.screen.print()
        seconds, output = time.perf_counter() - started, self.backend.output
        self.responses.append(ChatResponse(output, k, seconds))
        if output.text:
            self.messages += [message, {"role": "assistant", "content": output.text}]
        if self.interactive and self.screen.is_terminal:
            counts = output.num_accepted_tokens_per_pos[:k]
            summary = summarize_output(replace(output, num_accepted_tokens_per_pos=counts), seconds)
            endings = {"length": "; cut at --max-tokens", "abort": "; stopped"}
            self._print_notice(
                (summary if output.token_ids else f"{seconds:.1f} s") + endings.get(output.finish_reason or "", "")
            )

    @contextmanager
    def _handle_interrupts(self) -> Iterator[None]:
        """The first Ctrl-C stops the response, the second ends the chat. With piped input the first one does."""

        def interrupt(number: int, frame: Any) -> None:
            if self._interrupted or not self.interactive:
                raise KeyboardInterrupt
            self._interrupted = True
            self.backend.stop()

        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _run_command(self, line: str) -> Literal["leave", "stay"]:
        name, *arguments = line.split()
        if name in ("/exit", "/quit") and not arguments:
            return "leave"
        if name == "/reset" and not arguments:
            self.messages, self.responses = [], []
            self._print_notice("New conversation.")
        elif name == "/k":
            self._set_num_speculative_tokens(arguments)
        elif name in ("/on", "/off") and not arguments:
            if name == "/on":
                self._require_drafter(line)
            self.speculation_enabled = name == "/on"
            self._print_notice(f"Speculative decoding is {name[1:]}.")
        elif name == "/stats" and not arguments:
            for text in summarize_responses(self.responses):
                self.screen.print(text, soft_wrap=True)
        elif name == "/help" and not arguments:
            for command, description in COMMANDS.items():
                self.screen.print(f"  {command:<8} {description}")
        else:
            commands = ", ".join(COMMANDS)
            raise UserError(f"{line}: no such command; use {commands}, or // to begin a message with a slash")
        return "stay"

    def _set_num_speculative_tokens(self, arguments: list[str]) -> None:
        command = " ".join(["/k", *arguments])
        self._require_drafter(command)
        max_k = self.backend.max_speculative_tokens
        if len(arguments) != 1 or not arguments[0].isdecimal() or not 1 <= int(arguments[0]) <= max_k:
            raise UserError(f"{command}: must be a number from 1 to {max_k}, the limit set by -k")
        self.num_speculative_tokens, self.speculation_enabled = int(arguments[0]), True
        self._print_notice(f"K is {self.num_speculative_tokens}.")

    def _require_drafter(self, command: str) -> None:
        if not self.backend.max_speculative_tokens:
            raise UserError(f"{command}: there is no drafter; name one with -d")

    def _print_notice(self, text: str) -> None:
        if self.interactive:
            self.notices.print(text, style="dim", markup=False, soft_wrap=True)


def summarize_responses(responses: list[ChatResponse]) -> list[str]:
    """Returns the lines of /stats. The prefill produces the first token of a response, decode steps the others."""
    counted = [response for response in responses if response.output.token_ids]
    if not counted:
        return ["No responses yet." if not responses else "This server does not report its tokens."]
    outputs = [response.output for response in counted]
    num_tokens = sum(len(output.token_ids) for output in outputs)
    num_steps = sum(output.num_decode_steps for output in outputs)
    rate = num_tokens / sum(response.seconds for response in counted)
    lines = [
        f"{len(outputs)} response{'s' * (len(outputs) > 1)}: {num_tokens} tokens in {num_steps} decode steps, "
        f"{rate:.1f} tokens/s; {max(0, num_tokens - len(outputs) - num_steps)} decode steps saved"
    ]
    drafted = [response for response in counted if response.output.num_drafts]
    if drafted:
        num_drafts = sum(response.output.num_drafts for response in drafted)
        num_accepted = sum(sum(response.output.num_accepted_tokens_per_pos) for response in drafted)
        rates = []
        for i in range(max(response.num_speculative_tokens for response in drafted)):
            deep = [response.output for response in drafted if response.num_speculative_tokens > i]
            accepted = sum(output.num_accepted_tokens_per_pos[i] for output in deep)
            rates.append(f"{accepted / sum(output.num_drafts for output in deep):.0%}")
        length = 1 + num_accepted / num_drafts
        lines.append(f"acceptance length {length:.2f}; acceptance rate by position: {' '.join(rates)}")
    return lines
