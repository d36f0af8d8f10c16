"""What the scheduler needs to know, as plain numbers. Made from the engine's settings by
`assemble/build.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """How much of the engine's memory sessions may take, besides KV that gives way."""

    max_sessions: int = 256
    max_per_owner: int = 0  # of one owner that has a name; 0: as many as there may be
    max_turns: int = 1_000  # of one session
    max_tokens: int = 131_072  # of one session, all its turns together
    timeout_s: float = 600.0  # after so long without a request it is closed; 0: never


@dataclass(frozen=True, kw_only=True)
class PoolingLimits:
    """What may be asked of a model that generates nothing."""

    size: int  # numbers in a vector, or labels
    num_token_types: int = 0  # kinds of segments that tokens may belong to; 0: the model knows none
    is_embedding: bool = True  # else its scores are of labels


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    num_pages: int
    page_size: int
    max_running_requests: int
    context_length: int  # prompt and output together, in tokens
    vocab_size: int
    hidden_size: int = 0  # of the vectors that may stand for the tokens of a prompt; 0: none may
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    policy: str = "fcfs"
    aging_s: float = (
        0.0  # who has waited so long gets turns of its own, whatever the policy; 0: nobody
    )
    low_priority_first: bool = False
    preemption_threshold: int = (
        10  # lead in priority above which a waiting request takes a running one's place
    )
    tenant_weights: tuple[
        tuple[str, float], ...
    ] = ()  # name and share, for the policy "fair"; others have 1
    max_step_s: float = 0.0  # bound on the time between two tokens of a running request; 0: none
    max_prefill_tokens: int = 16_384
    chunked_prefill_size: int | None = None  # None: prompts are never cut
    mixed_chunk: bool = False
    max_queued_requests: int = 4_096
    max_queued_tokens: int = 0  # of the prompts of waiting requests; 0: no limit
    max_queue_s: float = 0.0  # longest wait for the first admission; 0: none
    max_run_s: float = 0.0  # longest run after it; 0: none
    schedule_conservativeness: float = 1.0
    sessions: SessionLimits = SessionLimits()
    pooling: PoolingLimits | None = None  # None: the model generates
    seed: int = 0
    started_with: SchedulerSettings | None = None  # if they have been changed since

    @property
    def sized_for(self) -> SchedulerSettings:
        """The settings that tables and the device's memory were laid out for."""
        return self.started_with or self

    def __post_init__(self) -> None:
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < self.page_size:
            raise ValueError(
                f"chunked_prefill_size is {self.chunked_prefill_size}; "
                f"it must be at least page_size ({self.page_size})"
            )
        if self.chunked_prefill_size is not None and self.max_prefill_tokens < self.page_size:
            raise ValueError(
                f"max_prefill_tokens is {self.max_prefill_tokens}; "
                f"it must be at least page_size ({self.page_size})"
            )
