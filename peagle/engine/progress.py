"""Progress bar of `LLM.generate(..., progress=True)`."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.engine.request import Request


class GenerationProgress:
    """Shows finished requests and output tokens per second."""

    def __init__(self, num_requests: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self.task = self.bar.add_task("", total=num_requests, rate="")
        self.num_tokens = self.num_finished = 0
        self._num_output_tokens: dict[int, int] = {}  # by request id
        self.bar.start()

    def update(self, requests: Sequence[Request]) -> None:
        for request in requests:
            num_output_tokens = len(request.output_token_ids)
            self.num_tokens += num_output_tokens - self._num_output_tokens.get(request.id, 0)
            self._num_output_tokens[request.id] = num_output_tokens
            self.num_finished += request.finish_reason is not None
        seconds = self.bar.tasks[self.task].elapsed or 1e-9
        self.bar.update(self.task, completed=self.num_finished, rate=f"{self.num_tokens / seconds:,.0f} tokens/s")

    def close(self) -> None:
        self.bar.stop()
