"""What the scheduler needs to know, as plain numbers. Made from the engine's settings by `service/worker.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    num_pages: int
    page_size: int
    max_running_requests: int
    context_length: int  # prompt and output together, in tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    policy: str = "fcfs"
    max_prefill_tokens: int = 16_384
    chunked_prefill_size: int | None = None  # None: prompts are never cut
    mixed_chunk: bool = False
    max_queued_requests: int = 4_096
    schedule_conservativeness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < self.page_size:
            raise ValueError(
                f"chunked_prefill_size is {self.chunked_prefill_size}; it must be at least page_size ({self.page_size})"
            )
