"""`peagle generate`: the response to one prompt. `peagle chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from peagle.cli.app import DRAFTER, JSON, TARGET, console, verb
from peagle.config import DEFAULT_NUM_SPECULATIVE_TOKENS, EngineSettings, SamplingParams
from peagle.config.options import option
from peagle.display import DRAFT_STYLE, TARGET_STYLE
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_DRAFTER, DEFAULT_TARGET

if TYPE_CHECKING:
    from peagle.cli.chat_server import ServerBackend
    from peagle.engine.request import CompletionOutput

TextParts = list[tuple[str, bool]]  # text, and whether it comes from an accepted draft token
EngineOptions = Annotated[
    EngineSettings, "num_speculative_tokens", "device", "dtype", "max_model_len", "kv_cache_dtype", "quantization"
]
ENGINE = EngineSettings(DEFAULT_NUM_SPECULATIVE_TOKENS, max_num_seqs=1)


@verb(
    'peagle generate "Why is the sky blue?"',
    'peagle generate "Why is the sky blue?" -d smollm2-135m-p-eagle -k 7',
    "cat prompt.txt | peagle generate - --raw --json",
)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    params: SamplingParams,
    settings: EngineOptions = ENGINE,
    target: str = TARGET,
    drafter: str | None = DRAFTER,
    raw: bool = option(False, "Use the prompt without the chat template.", panel="Sampling"),
    as_json: bool = JSON,
) -> None:
    """Generate the response to a prompt, with speculative decoding if there is a drafter.

    The output is the same with and without a drafter.
    """
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError:
            raise UserError("standard input is not valid UTF-8") from None
    if not prompt.strip():
        raise UserError("the prompt is empty")
    engine = EmbeddedEngine(target, drafter, settings)

    from peagle.checkpoints.target import encode_prompt

    prompt_token_ids = encode_prompt(engine.llm.tokenizer, prompt, raw)
    screen = console()
    started = time.perf_counter()
    for parts in engine.stream(prompt_token_ids, params):
        if not as_json:
            print_parts(screen, parts)
    seconds = time.perf_counter() - started
    if as_json:
        request = {"target": target, "drafter": drafter, "num_prompt_tokens": len(prompt_token_ids)}
        measured = {"acceptance_length": round(engine.output.acceptance_length, 4), "seconds": round(seconds, 3)}
        print(json.dumps(request | asdict(engine.output) | measured))
        return
    screen.print()
    if sys.stdout.isatty():
        console(stderr=True).print(f"[dim]{summarize_output(engine.output, seconds)}[/dim]")


class EmbeddedEngine:
    """The engine in this process, for one request at a time. `output` is the last completion, also a stopped one."""

    output: CompletionOutput

    def __init__(self, target: str, drafter: str | None, settings: EngineSettings) -> None:
        from peagle.engine.llm import LLM

        if drafter is None:
            settings = replace(settings, num_speculative_tokens="auto")
        self.llm = LLM(target, drafter, **vars(settings))
        self.max_speculative_tokens = self.llm.scheduler.max_speculative_tokens if drafter is not None else 0
        k = settings.num_speculative_tokens
        self.description = target if drafter is None else f"{target} with {drafter}, K {k}"
        self._stopped = False

    def respond(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[TextParts]:
        """Yields the response to a conversation."""
        return self.stream(self.llm.encode_chat(messages), params)

    def stream(self, prompt_token_ids: list[int], params: SamplingParams) -> Iterator[TextParts]:
        """Yields the new text after every engine step."""
        from peagle.engine.detokenizer import Detokenizer

        self._stopped = False
        decode = partial(self.llm.tokenizer.decode, skip_special_tokens=True)
        detokenizer, num_chars = Detokenizer(decode), 0
        with closing(self.llm.stream(prompt_token_ids, params)) as outputs:
            for out in outputs:
                self.output = out
                if params.stop:  # only the engine's text is cut at the right place
                    yield [(out.text[num_chars:], False)]
                    num_chars = max(num_chars, len(out.text))
                else:
                    new = slice(detokenizer.num_tokens, None)
                    texts = detokenizer.add_separately(out.token_ids[new], out.finish_reason is not None)
                    yield list(zip(texts, out.is_draft_token[new], strict=True))
                if self._stopped:
                    out.finish_reason = out.finish_reason or "abort"
                    break

    def stop(self) -> None:
        """Ends the stream after the current step. A signal handler may call it."""
        self._stopped = True


def print_parts(screen: Console, parts: TextParts) -> None:
    """Prints text, with accepted draft tokens shaded."""
    for text, is_draft_token in parts:
        screen.print(Text(text, style=DRAFT_STYLE if is_draft_token else TARGET_STYLE), end="", soft_wrap=True)


def summarize_output(output: CompletionOutput, seconds: float) -> str:
    text = f"{len(output.token_ids)} tokens in {1 + output.num_decode_steps} forward passes, {seconds:.1f} s"
    if not output.num_accepted_tokens_per_pos:
        return text
    counts = " ".join(map(str, output.num_accepted_tokens_per_pos))
    return f"{text}; acceptance length {output.acceptance_length:.2f}; accepted draft tokens by position: {counts}"


PARAMS = SamplingParams(max_tokens=512)
COMMANDS = {
    "/reset": "start a new conversation",
    "/k N": "use at most N draft tokens per decode step",
    "/off": "turn speculative decoding off, like /k 0",
    "/on": "use as many draft tokens as -k allows",
    "/stats": "show the acceptance statistics of the conversation",
    "/exit": "leave",
}


@verb(
    "peagle chat",
    "peagle chat -t ./my-model -d ./my-drafter -k 5",
    "peagle chat --url http://localhost:8000",
    "printf 'Hello.\\nAnd again?\\n' | peagle chat",
)
def chat(
    params: Annotated[SamplingParams, "max_tokens", "temperature", "top_p", "seed"] = PARAMS,
    settings: EngineOptions = ENGINE,
    target: str = TARGET,
    drafter: str | None = DRAFTER,
    url: str | None = option(None, "Use this running server instead; $OPENAI_API_KEY is sent.", metavar="URL"),
    system: str | None = option(None, "System prompt.", panel="Sampling"),
) -> None:
    """Chat with a model in the terminal; accepted draft tokens are shaded. Type /help for the commands.

    The default target has a default drafter; other targets use speculative decoding only with -d.
    """
    if url is not None:
        from peagle.cli.chat_server import ServerBackend

        backend: EmbeddedEngine | ServerBackend = ServerBackend(url)
    else:
        if drafter is None and target == DEFAULT_TARGET:
            drafter = DEFAULT_DRAFTER
        backend = EmbeddedEngine(target, drafter, settings)
        if not backend.llm.has_tokenizer:
            raise UserError(f"--target {target}: has no tokenizer, which a chat needs")
        backend.llm.encode_chat([{"role": "user", "content": "Hello"}])  # raises if there is no chat template
    ChatSession(backend, params, settings.num_speculative_tokens, system).run()


class ChatSession:
    """The turns of a conversation. With piped input it prints only the responses, and ends at the first error."""

    def __init__(
        self, backend: EmbeddedEngine | ServerBackend, params: SamplingParams, k: int | str, system: str | None
    ) -> None:
        self.backend, self.params, self.system = backend, params, system
        self.screen, self.notices = console(), console(stderr=True)
        self.interactive = sys.stdin.isatty()
        max_k = backend.max_speculative_tokens
        self.num_speculative_tokens = min(k, max_k) if isinstance(k, int) else max_k
        self.messages: list[dict[str, str]] = []
        self.responses: list[tuple[CompletionOutput, float]] = []  # with the seconds they took
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
                    if line in ("/exit", "/quit"):
                        return
                    self._run_command(line)
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
        params = replace(self.params, max_speculative_tokens=self.num_speculative_tokens)
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
        self.responses.append((output, seconds))
        if output.text:
            self.messages += [message, {"role": "assistant", "content": output.text}]
        if self.interactive and self.screen.is_terminal:
            counts = output.num_accepted_tokens_per_pos[: self.num_speculative_tokens]
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

    def _run_command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if line == "/reset":
            self.messages, self.responses = [], []
            self._print_notice("New conversation.")
        elif line in ("/on", "/off") or name == "/k":
            self._set_num_speculative_tokens(line, argument)
        elif line == "/stats":
            self.screen.print(summarize_responses(self.responses), soft_wrap=True)
        elif line == "/help":
            for command, description in COMMANDS.items():
                self.screen.print(f"  {command:<8} {description}")
        else:
            commands = ", ".join(COMMANDS)
            raise UserError(f"{line}: no such command; use {commands}, or // to begin a message with a slash")

    def _set_num_speculative_tokens(self, line: str, argument: str) -> None:
        max_k = self.backend.max_speculative_tokens
        if line != "/off" and not max_k:
            raise UserError(f"{line}: there is no drafter; name one with -d")
        argument = {"/on": str(max_k), "/off": "0"}.get(line, argument)
        if not argument.isdecimal() or not 0 <= int(argument) <= max_k:
            raise UserError(f"{line}: must be a number from 0 to {max_k}, the limit set by -k")
        self.num_speculative_tokens = int(argument)
        self._print_notice(f"K is {argument}." if int(argument) else "Speculative decoding is off.")

    def _print_notice(self, text: str) -> None:
        if self.interactive:
            self.notices.print(text, style="dim", markup=False, soft_wrap=True)


def summarize_responses(responses: list[tuple[CompletionOutput, float]]) -> str:
    """Returns the text of /stats. The prefill produces the first token of a response, decode steps the others."""
    counted = [(output, seconds) for output, seconds in responses if output.token_ids]
    if not counted:
        return "No responses yet." if not responses else "This server does not report its tokens."
    num_tokens = sum(len(output.token_ids) for output, _ in counted)
    num_steps = sum(output.num_decode_steps for output, _ in counted)
    num_drafts = sum(output.num_drafts for output, _ in counted)
    num_accepted = sum(sum(output.num_accepted_tokens_per_pos) for output, _ in counted)
    rate = num_tokens / sum(seconds for _, seconds in counted)
    length = f"; acceptance length {1 + num_accepted / num_drafts:.2f}" if num_drafts else ""
    return f"responses: {len(counted)}; {num_tokens} tokens in {num_steps} decode steps, {rate:.1f} tokens/s{length}"
