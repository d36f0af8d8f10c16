"""Guesses of the next tokens. They are right in a simulation as often as in the texts of the model
that the machine was measured with; without such texts, nothing is known of them."""

from __future__ import annotations

from collections.abc import Sequence

from weft.capacity.axes.axis import SettingAxis
from weft.capacity.machine import MeasuredMachine
from weft.config.drafts import OFF
from weft.scheduler.settings import SchedulerSettings


def _sources(machine: MeasuredMachine, settings: SchedulerSettings) -> Sequence[str]:
    if machine.guesses is None or settings.states is not None:
        return ()
    return (OFF, "ngram")


GUESSES = SettingAxis("speculative", _sources)
