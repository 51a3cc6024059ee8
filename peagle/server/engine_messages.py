"""Messages between the front end and the engine process, and the socket that carries them.

A message is a 4-byte length and a msgpack array. The front end sends `AddRequest` and `AbortRequest`; the engine sends
one `StepOutput` per step with the new tokens of all requests, and the other messages when they occur.
"""

import select
import socket
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from peagle.config import SamplingParams

RECEIVE_BYTES = 1 << 20


class AddRequest(msgspec.Struct, array_like=True, tag=True):
    """A prompt. `params.stop` is empty and `params.detokenize` off: text is the front end's work."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    send_every_step: bool  # otherwise one delta with the whole completion


class AbortRequest(msgspec.Struct, array_like=True, tag=True):
    request_id: int
    index: int | None = None  # of the completion; None: all


class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """Properties of the engine that do not change while the server runs."""

    target_folder: str
    max_model_len: int
    vocab_size: int
    max_speculative_tokens: int
    method: Literal["p-eagle", "eagle3"] | None
    max_num_seqs: int
    device: str
    dtype: str
    memory_bytes: dict[str, int]


class EngineFailed(msgspec.Struct, array_like=True, tag=True):
    """The last message of an engine that ends with an error."""

    error: str
    is_user_error: bool


class RequestFailed(msgspec.Struct, array_like=True, tag=True):
    """Only this request fails. A user error is the client's fault."""

    request_id: int
    error: str
    is_user_error: bool


class CompletionDelta(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one completion."""

    request_id: int
    index: int  # of the completion, 0 to n - 1
    token_ids: list[int]
    num_accepted_per_step: list[int]  # accepted draft tokens of each decode step; empty without a drafter
    num_decode_steps: int  # of all its tokens
    num_drafts: int  # those with draft tokens
    earlier_times: list[float]  # times of earlier steps whose tokens are in this delta; empty when streaming
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    ends_with_stop_token: bool  # the last token is EOS or a stop token, which is not part of the text


class EngineCounters(msgspec.Struct, array_like=True, gc=False):
    """Current state and counts of an engine since it started."""

    num_requests_running: int = 0
    kv_cache_usage: float = 0.0  # share of the cache's blocks in use, 0 to 1
    acceptance_histogram: list[int] = []  # number of drafts by number of accepted tokens
    num_draft_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_cache_hits: int = 0
    num_prefix_cache_queries: int = 0
    num_late_compilations: int = 0  # kernels compiled since the engine was ready


class EngineReady(msgspec.Struct, array_like=True, tag=True):
    info: EngineInfo
    counters: EngineCounters


class StepOutput(msgspec.Struct, array_like=True, tag=True, gc=False):
    time: float  # time.perf_counter()
    deltas: list[CompletionDelta]
    started: list[tuple[int, int]]  # request id and completion index of those that left the queue
    counters: EngineCounters


Command = AddRequest | AbortRequest
EngineMessage = EngineReady | EngineFailed | RequestFailed | StepOutput

_encoder = msgspec.msgpack.Encoder()


def encode_message(message: msgspec.Struct) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "little") + data


class MessageReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._rest = b""  # the beginning of a message

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that are complete. They are decoded one by one: hundreds at once would be slower."""
        data, begin = self._rest + data, 0
        while len(data) - begin >= 4:
            end = begin + 4 + int.from_bytes(data[begin : begin + 4], "little")
            if len(data) < end:
                break
            yield self._decoder.decode(memoryview(data)[begin + 4 : end])
            begin = end
        self._rest = data[begin:]


class EngineChannel:
    """The engine's end of the socket. Sending never waits: what the front end has not taken yet stays in a buffer."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = MessageReader(Command)
        self._unsent = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        self._unsent += encode_message(message)
        self._flush()

    def receive(self, timeout: float | None = 0.0) -> list[Command]:
        """Returns the commands that have arrived; waits for one at most `timeout` seconds (None: without a limit).

        Raises `ConnectionError` if the front end has gone.
        """
        self._flush()
        if timeout != 0.0:
            select.select([self._socket], [self._socket] if self._unsent else [], [], timeout)
            self._flush()
        commands: list[Command] = []
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return commands
            if not data:
                raise ConnectionError("the front end has closed the connection")
            commands += self._reader.feed(data)

    def close(self) -> None:
        """Sends what is left."""
        try:
            self._socket.setblocking(True)
            self._socket.sendall(self._unsent)
        except OSError:
            pass
        self._socket.close()

    def _flush(self) -> None:
        while self._unsent:
            try:
                num_sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:num_sent]
