"""Settings of the scheduler: its options, the sizes of memory, and facts about the model.

The options are declared in `config/scheduling.py`. `assemble/build.py` makes these settings from
those of the engine, after every "auto" is resolved. This module knows no device and no file.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.drafts import AUTO, MODEL, OWN_STEPS, parse_draft_sources
from weft.config.media import MediaRules
from weft.config.pairs import parse_tenant_parts, parse_tenant_weights
from weft.config.scheduling import SchedulingOptions
from weft.config.sight import Sight
from weft.config.windows import least_window_tokens


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits of sessions on the engine's memory, apart from KV that can be evicted."""

    max_sessions: int = 256
    max_per_owner: int = 0  # of one named owner; 0: no limit below `max_sessions`
    max_turns: int = 1_000  # of one session
    max_tokens: int = 131_072  # of one session, over all its turns
    timeout_s: float = 600.0  # a session without a request for this time is closed; 0: never


@dataclass(frozen=True, kw_only=True)
class PoolingLimits:
    """Limits of a model that makes vectors or scores and generates no tokens."""

    size: int  # numbers in a vector, or number of labels
    num_token_types: int = 0  # kinds of segments that tokens may belong to; 0: none
    is_embedding: bool = True  # False: the model gives scores of labels
    can_be_cut: bool = True  # whether the first numbers of a vector are a vector, too


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """The layers with sliding windows, if they have pages of their own."""

    window: int  # tokens that a token sees, itself included, in the layer with the widest window
    num_pages: int
    chunked: bool = False  # `window` is the size of chunks: a token sees those of its own

    @property
    def sight(self) -> Sight:
        return Sight(self.window, self.chunked)

    def least_pages(self, page_size: int, step_tokens: int) -> int:
        """The pages that a request needs to run alone, in steps of `step_tokens` tokens."""
        return least_window_tokens(self.window, page_size, step_tokens) // page_size


CLIP_MAX_NEW_TOKENS = 4096  # a request is not expected to generate more tokens
LEAST_STATE_SLOTS = 2  # to run any request: a slot to read and a slot to write


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """The layers that keep a state, if the model has such layers."""

    num_slots: int
    least_border: int = 64  # tokens; rows write copies of their states at multiples of a border
    # Tokens that two requests must share after a snapshot for the second to write another there.
    least_shared: int = 256

    def border(self, page_size: int) -> int:
        """Tokens between two places where a copy may be written: whole pages."""
        return -(-self.least_border // page_size) * page_size


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """The store of KV outside of the pool, if there is one."""

    block_len: int = 64  # tokens per block, whole pages
    block_bytes: int = 0  # K and V of one block
    wait_s: float = 2.0  # longest wait of a request for its pages; 0: requests do not wait
    write: str = "selective"  # when blocks are written (`CACHE_WRITE` in config/engine.py)
    # Whether pages are written before they are evicted, whoever used them: this store is fast.
    saves_evicted: bool = False
    where: str = "disk"  # name of the store in texts for users


@dataclass(frozen=True, kw_only=True)
class HandoffSettings:
    """For a server that computes prompts for others, or that continues such prompts."""

    mode: str  # "prefill" or "decode"
    lease_s: float = 30.0  # how long KV is kept that no server asks for
    wait_s: float = 60.0  # longest wait of a request for its KV
    fallback: str = "compute"  # or "fail"
    largest_share: float = 0.5  # largest part of the pool that may be lent


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """The draft model, or the head that reads hidden states of the model, if there is one."""

    vocab_size: int  # ids that it knows; a request with other ids has no drafts of the model
    context_length: int  # the model makes no drafts after this many tokens
    source: str = MODEL  # which of `OWN_STEPS` it is

    @property
    def is_head(self) -> bool:
        return self.source != MODEL


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(SchedulingOptions):
    """The options of the scheduler, with 0 and "auto" resolved, and the sizes that they apply
    to."""

    num_pages: int
    page_size: int
    context_length: int  # prompt and output together, in tokens
    vocab_size: int
    num_layers: int = 0  # of the model; 0: a step computes all of them
    hidden_size: int = 0  # of input vectors in prompts; 0: they are not allowed
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    copies_pages: bool = False  # whether requests copy parts of cached pages
    sessions: SessionLimits = SessionLimits()
    pooling: PoolingLimits | None = None  # None: the model generates tokens
    windows: WindowSettings | None = None  # None: all layers share one pool of pages
    states: StateSettings | None = None  # None: no layer keeps a state
    draft: DraftSettings | None = None  # None: there is no draft model
    media: MediaRules | None = None  # None: the model takes no pictures, videos or sounds
    tiers: TierSettings | None = None  # None: KV exists only in the pool
    handoff: HandoffSettings | None = None  # None: this server runs whole requests
    # Pipeline stages that work at once on steps of different rows. 1: a step ends before the next
    # one begins, or the next one may continue its rows.
    num_stages: int = 1
    # largest number of rows of a decode step with several stages; 0: no bound
    max_stage_rows: int = 0
    seed: int = 0
    kv_groups: tuple[str, ...] = ()  # groups of layers from outside of weft, by `module:Name`
    outside_control: tuple[str, ...] = ()  # control requests from there
    started_with: SchedulerSettings | None = None  # if they have been changed since the start

    @property
    def sized_for(self) -> SchedulerSettings:
        """The settings for which tables and the device's memory were sized."""
        return self.started_with or self

    @property
    def can_copy_pages(self) -> bool:
        """Whether a step can take a part of a page from another one: neither a second model nor a
        later step for the other layers needs the same tokens."""
        if not self.prefix_cache or self.page_size == 1:
            return False
        if self.draft is not None or self.split_prefill_layers:
            return False
        return not self.keeps_items_unsplit

    @property
    def chunk_len(self) -> int | None:
        """The longest piece of a prompt in one step, in tokens; None: no length cuts prompts."""
        if self.chunked_prefill_size <= 0:
            return None
        if self.media is None or not self.media.longest_unsplit:
            return self.chunked_prefill_size
        return max(self.chunked_prefill_size, self.media.longest_unsplit + 2 * self.page_size)

    @property
    def piece_len(self) -> int | None:
        """The longest piece of a prompt in one step, in tokens; None: prompts are never cut. Where
        running requests are to have their tokens in time, prompts are cut whatever a chunk has."""
        if self.chunk_len is not None or not self.bounds_steps or self.pooling is not None:
            return self.chunk_len
        longest = self.media.longest_unsplit if self.media is not None else 0
        return max(self.max_prefill_tokens, longest + 2 * self.page_size)

    @property
    def max_step_tokens(self) -> int:
        """The largest number of tokens in a step with prompts."""
        return min(self.chunk_len or self.max_prefill_tokens, self.max_prefill_tokens)

    @property
    def keeps_items_unsplit(self) -> bool:
        """Whether a step computes all tokens of a picture, or none."""
        return self.media is not None and self.media.sees_both_ways

    @property
    def encoder_tokens(self) -> int:
        """Tokens of pictures, videos and sounds that are encoded in one step. An item with more
        tokens is encoded alone."""
        return self.max_encoder_tokens or self.max_step_tokens

    @property
    def max_step_s(self) -> float:
        """Bound on the time between two tokens of a running request; 0: none."""
        return self.max_step_ms / 1_000

    @property
    def bounds_steps(self) -> bool:
        """Whether prompts are cut so that running requests get their tokens in time."""
        return self.max_step_ms > 0 or self.max_slowdown > 0

    @property
    def repeats_runs(self) -> bool:
        """Whether a step may compute the run of the step before again, whose drafts are not
        compared yet. Pages before a window are freed while a run may still be computed again, and
        states have gone on."""
        has_one_pool = self.windows is None and self.states is None
        return bool(self.draft_sources) and self.draft is None and has_one_pool

    @property
    def draft_sources(self) -> tuple[str, ...]:
        """The names of the sources of drafts; empty: requests have no drafts. Raises
        SettingsError."""
        if self.speculative == AUTO:
            return ()  # `auto` was not resolved
        names = parse_draft_sources(self.speculative, "--speculative")
        there = "" if self.draft is None else self.draft.source
        return tuple(name for name in names if name == there or name not in OWN_STEPS)

    @property
    def pin_shares(self) -> dict[str, float]:
        """Share of the memory for pins, by name of tenant. Raises SettingsError."""
        return dict(parse_tenant_parts(self.tenant_cache, "--tenant-cache"))

    @property
    def tenant_shares(self) -> dict[str, float]:
        """Weight by name of tenant. Raises SettingsError."""
        return dict(parse_tenant_weights(self.tenant_weights, "--tenant-weights"))

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict each other or cannot be parsed."""
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
        if self.keeps_items_unsplit:
            raise ValueError(
                "layers that keep a state read tokens in their order; the tokens of a picture "
                "cannot see each other both ways (sees_both_ways)"
            )
        if self.split_prefill_layers:
            raise ValueError(
                f"split_prefill_layers is {self.split_prefill_layers}; prefills of a model with "
                "layers that keep a state cannot be split"
            )
        if self.windows is not None and (self.tiers is not None or self.handoff is not None):
            raise ValueError(
                "K and V of a model with layers with windows beside layers that keep a state "
                "cannot be stored outside of the pool or handed to another server"
            )
        if states.num_slots < LEAST_STATE_SLOTS:
            raise ValueError(
                f"{states.num_slots} slots for states; at least {LEAST_STATE_SLOTS} are needed"
            )
