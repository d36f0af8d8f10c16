"""All features that requests may use, in the order in which a step calls them.

A new feature is a line here. The order matters only where two features add to the same list of a
step: operations of one type (`plan/logits.py`), and replies.
"""

from __future__ import annotations

from weft.config.handoff import PREFILL
from weft.grammar.protocol import Grammars
from weft.memory.handoff.protocol import Handoff, NoHandoff
from weft.scheduler.feature import Feature
from weft.scheduler.features.adapters import AdaptersFeature
from weft.scheduler.features.allowed import AllowedTokensFeature
from weft.scheduler.features.bad_words import BadWordsFeature
from weft.scheduler.features.bias import LogitBiasFeature
from weft.scheduler.features.deadlines import DeadlineFeature
from weft.scheduler.features.grammar import GrammarFeature
from weft.scheduler.features.handoff import LendFeature, PullFeature
from weft.scheduler.features.hidden import HiddenStatesFeature
from weft.scheduler.features.logprobs import LogprobsFeature
from weft.scheduler.features.media import MediaFeature
from weft.scheduler.features.penalties import PenaltiesFeature
from weft.scheduler.features.pins import PinsFeature
from weft.scheduler.features.pooling import PoolingFeature
from weft.scheduler.features.processors import ProcessorChecks, ProcessorsFeature
from weft.scheduler.features.prompt_logprobs import PromptLogprobsFeature
from weft.scheduler.features.sessions import Sessions
from weft.scheduler.features.speech import SpeechFeature
from weft.scheduler.features.thinking import ThinkingBudgetFeature
from weft.scheduler.features.tiers import TiersFeature
from weft.scheduler.features.tool_pauses import ToolPausesFeature
from weft.scheduler.features.vectors import InputVectorsFeature
from weft.scheduler.settings import SchedulerSettings


class Features:
    """`all` of them, and by name those that the engine uses directly."""

    def __init__(
        self,
        settings: SchedulerSettings,
        grammars: Grammars,
        checks: ProcessorChecks,
        handoff: Handoff | None = None,
    ) -> None:
        self.vectors = InputVectorsFeature(settings.hidden_size)
        self.media = MediaFeature(settings)
        self.deadlines = DeadlineFeature()
        self.sessions = Sessions(settings.sessions)
        self.grammar = GrammarFeature(grammars, settings.eos_token_ids)
        self.adapters = AdaptersFeature(
            settings.max_loras_per_batch,
            settings.max_loaded_loras,
            settings.sized_for.max_running_requests,
        )
        # Only if there is a store, so that otherwise no request visits the feature.
        self.tiers: TiersFeature | None = None
        stored: tuple[Feature, ...] = ()
        if settings.tiers is not None:
            self.tiers = TiersFeature(settings.tiers)
            stored = (self.tiers,)
        self.pins = PinsFeature(settings, self.tiers)
        self.tool_pauses = ToolPausesFeature(settings, self.pins.book)
        self.handoff: LendFeature | PullFeature | None = None
        handed: tuple[Feature, ...] = ()
        if settings.handoff is not None:
            if settings.handoff.mode == PREFILL:
                self.handoff = LendFeature(settings.handoff, handoff or NoHandoff())
            else:
                self.handoff = PullFeature()
            handed = (self.handoff,)
        self.all: tuple[Feature, ...] = (
            LogitBiasFeature(settings.eos_token_ids, settings.vocab_size),
            PenaltiesFeature(),
            LogprobsFeature(),
            PromptLogprobsFeature(),
            HiddenStatesFeature(),
            self.vectors,
            self.media,
            PoolingFeature(),
            AllowedTokensFeature(settings.vocab_size),
            BadWordsFeature(),
            SpeechFeature(settings.vocab_size),
            ThinkingBudgetFeature(),
            ProcessorsFeature(checks),
            self.adapters,
            self.sessions,
            self.deadlines,
            self.grammar,
            self.pins,
            self.tool_pauses,
            *stored,
            *handed,
        )
