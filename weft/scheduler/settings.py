"""What the scheduler needs to know: its options, the sizes of memory, and facts about the model.

The options are declared in `config/scheduling.py`. `assemble/build.py` makes the settings from the
engine's, in which no "auto" is left. Knows no device and no file.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.drafts import AUTO, MODEL, parse_draft_sources
from weft.config.media import MediaRules
from weft.config.pairs import parse_tenant_parts, parse_tenant_weights
from weft.config.scheduling import SchedulingOptions
from weft.config.windows import least_window_tokens


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """How much of the engine's memory sessions may take, besides KV that can be evicted."""

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
class WindowSettings:
    """The layers with sliding windows, where they have pages of their own."""

    window: int  # tokens that a token sees, itself included, in the widest of them
    num_pages: int

    def least_pages(self, page_size: int, step_tokens: int) -> int:
        """The pages without which a request could not run alone, in steps of so many tokens."""
        return least_window_tokens(self.window, page_size, step_tokens) // page_size


LEAST_STATE_SLOTS = 2  # without which no request can run: one that it reads, and its own


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """The layers that keep a state, where a model has such layers."""

    num_slots: int
    least_border: int = 64  # tokens; rows leave copies of their states at multiples of a border
    # Tokens that two requests must share beyond a snapshot for the second to leave another there.
    least_shared: int = 256

    def border(self, page_size: int) -> int:
        """Tokens between two places where a copy may be left: whole pages."""
        return -(-self.least_border // page_size) * page_size


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """The store of KV outside of the pool, where there is one."""

    block_len: int = 64  # tokens of a block, whole pages
    block_bytes: int = 0  # of K and V
    wait_s: float = 2.0  # that a request waits for its pages, at most; 0: it never does
    write: str = "selective"  # when blocks are written (`CACHE_WRITE` in config/engine.py)
    # Whether what is going to be evicted is written before, whoever has used it: that is quick.
    saves_evicted: bool = False
    where: str = "disk"  # it is; for people


@dataclass(frozen=True, kw_only=True)
class HandoffSettings:
    """Another server computes prompts for this one, or continues those that this one computes."""

    mode: str  # "prefill" or "decode"
    lease_s: float = 30.0  # that KV is kept for which nobody asks
    wait_s: float = 60.0  # that a request waits for its KV, at most
    fallback: str = "compute"  # or "fail"
    largest_share: float = 0.5  # of the pool that is lent


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """A draft model, where there is one."""

    vocab_size: int  # ids that it knows; a request with another one has no drafts of it
    context_length: int  # behind so many tokens it makes none


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(SchedulingOptions):
    """The options of the scheduler, with values where users may write 0, and what they apply to."""

    num_pages: int
    page_size: int
    context_length: int  # prompt and output together, in tokens
    vocab_size: int
    num_layers: int = 0  # of the model; 0: a step computes all of them
    hidden_size: int = 0  # of the vectors that may be given for tokens of a prompt; 0: none may
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    sessions: SessionLimits = SessionLimits()
    pooling: PoolingLimits | None = None  # None: the model generates
    windows: WindowSettings | None = None  # None: all layers share one pool of pages
    states: StateSettings | None = None  # None: no layer keeps a state
    draft: DraftSettings | None = None  # None: there is no draft model
    media: MediaRules | None = None  # None: the model takes no pictures, videos or sounds
    tiers: TierSettings | None = None  # None: KV is nowhere but in the pool
    handoff: HandoffSettings | None = None  # None: this server does whole requests
    # That work at once on steps of different rows; 1: a step is over before the next one begins, or
    # the next one may continue its rows.
    num_stages: int = 1
    max_stage_rows: int = 0  # of a step that only decodes, where stages work at once; 0: no bound
    seed: int = 0
    started_with: SchedulerSettings | None = None  # if they have been changed since

    @property
    def sized_for(self) -> SchedulerSettings:
        """The settings that tables and the device's memory were laid out for."""
        return self.started_with or self

    @property
    def chunk_len(self) -> int | None:
        """The longest piece of a prompt in one step, in tokens; None: no length cuts prompts."""
        if self.chunked_prefill_size <= 0:
            return None
        if self.media is None or not self.media.longest_whole:
            return self.chunked_prefill_size
        return max(self.chunked_prefill_size, self.media.longest_whole + 2 * self.page_size)

    @property
    def piece_len(self) -> int | None:
        """The longest piece of a prompt in one step, in tokens; None: prompts are never cut. Where
        running requests are to have their tokens in time, prompts are cut whatever a chunk has."""
        if self.chunk_len is not None or not self.bounds_steps or self.pooling is not None:
            return self.chunk_len
        longest = self.media.longest_whole if self.media is not None else 0
        return max(self.max_prefill_tokens, longest + 2 * self.page_size)

    @property
    def max_step_tokens(self) -> int:
        """Tokens that a step with prompts computes, at most."""
        return min(self.chunk_len or self.max_prefill_tokens, self.max_prefill_tokens)

    @property
    def keeps_items_whole(self) -> bool:
        """Whether a step computes all tokens of a picture, or none."""
        return self.media is not None and self.media.sees_both_ways

    @property
    def encoder_tokens(self) -> int:
        """Tokens of pictures, videos and sounds that are encoded in one step, where one that has
        more is encoded alone."""
        return self.max_encoder_tokens or self.max_step_tokens

    @property
    def max_step_s(self) -> float:
        """Bound on the time between two tokens of a running request; 0: none."""
        return self.max_step_ms / 1_000

    @property
    def bounds_steps(self) -> bool:
        """Whether prompts are cut so that running requests have their tokens in time."""
        return self.max_step_ms > 0 or self.max_slowdown > 0

    @property
    def draft_sources(self) -> tuple[str, ...]:
        """Where drafts come from, by name; none: requests have no drafts. Raises SettingsError."""
        if self.speculative == AUTO:
            return ()  # nobody has decided
        if self.states is not None:
            return ()  # a state cannot go back behind a token
        names = parse_draft_sources(self.speculative, "--speculative")
        return tuple(name for name in names if name != MODEL or self.draft is not None)

    @property
    def pin_shares(self) -> dict[str, float]:
        """Part of what may be pinned, by name of tenant. Raises SettingsError."""
        return dict(parse_tenant_parts(self.tenant_cache, "--tenant-cache"))

    @property
    def tenant_shares(self) -> dict[str, float]:
        """Weight by name of tenant. Raises SettingsError."""
        return dict(parse_tenant_weights(self.tenant_weights, "--tenant-weights"))

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict each other or cannot be read."""
        if self.max_running_requests < 1:
            raise ValueError(
                f"max_running_requests is {self.max_running_requests}; it must be at least 1"
            )
        parse_tenant_weights(self.tenant_weights, "--tenant-weights")
        parse_tenant_parts(self.tenant_cache, "--tenant-cache")
        if self.speculative != AUTO:
            parse_draft_sources(self.speculative, "--speculative")
        if self.split_prefill_layers and not self.num_layers:
            raise ValueError(
                f"split_prefill_layers is {self.split_prefill_layers}; "
                "the number of the model's layers (num_layers) must be known for it"
            )
        if self.split_prefill_layers and self.draft_sources:
            raise ValueError(
                f"split_prefill_layers is {self.split_prefill_layers}; "
                "no tokens are guessed then (speculative must be off)"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"ngram_min is {self.ngram_min}; it must be at most ngram_max ({self.ngram_max})"
            )
        if self.draft is not None and self.windows is not None:
            raise ValueError("layers with windows have no pages of their own beside a draft model")
        if self.windows is not None:
            least = self.windows.least_pages(self.page_size, self.chunk_len or 0)
            if self.windows.num_pages < least:
                raise ValueError(
                    f"{self.windows.num_pages} pages for layers with windows of "
                    f"{self.windows.window} tokens; at least {least} are needed"
                )
        if self.states is not None:
            self._check_states(self.states)
        if self.chunk_len is None:
            return
        if self.chunk_len < self.page_size:
            raise ValueError(
                f"chunked_prefill_size is {self.chunk_len}; "
                f"it must be at least page_size ({self.page_size})"
            )
        if self.max_prefill_tokens < self.page_size:
            raise ValueError(
                f"max_prefill_tokens is {self.max_prefill_tokens}; "
                f"it must be at least page_size ({self.page_size})"
            )

    def _check_states(self, states: StateSettings) -> None:
        if self.keeps_items_whole:
            raise ValueError(
                "layers that keep a state read tokens in their order; the tokens of a picture "
                "cannot see each other both ways (sees_both_ways)"
            )
        if self.split_prefill_layers:
            raise ValueError(
                f"split_prefill_layers is {self.split_prefill_layers}; prefills of a model with "
                "layers that keep a state cannot be split"
            )
        if self.windows is not None:
            raise ValueError(
                "layers with windows cannot have pages of their own in a model with layers that "
                "keep a state"
            )
        if states.num_slots < LEAST_STATE_SLOTS:
            raise ValueError(
                f"{states.num_slots} slots for states; at least {LEAST_STATE_SLOTS} are needed"
            )
