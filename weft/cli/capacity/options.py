"""Options of `weft plan` and `weft tune`."""

from __future__ import annotations

from dataclasses import dataclass

from weft.capacity.trial import TrialSettings
from weft.capacity.workload import MAX_USERS
from weft.config.options import option
from weft.sim.report import Slo
from weft.sim.synthetic import LENGTHS


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    trace: str = option(
        "",
        "what arrives: a journal of weft serve, whose steps are then the measurement (weft tune "
        "needs the server's), or a trace (BurstGPT's CSV, Mooncake's JSON lines); without it, "
        "users who chat",
        group="workload",
        everyday=True,
    )
    users: int = option(
        0,
        "number of users that must be served; 0: as many as possible",
        group="workload",
        everyday=True,
        low=0,
        high=MAX_USERS,
    )
    prompt: str = option(
        "lognormal:150:0.8",
        f"new tokens in a message of a user: {LENGTHS}",
        group="workload",
        everyday=True,
    )
    output: str = option(
        "lognormal:100:0.6", "tokens of an answer, likewise", group="workload", everyday=True
    )
    messages: int = option(
        4,
        "messages in a chat; each comes after all before it, with their answers",
        group="workload",
        everyday=True,
        low=1,
        high=1_000,
    )
    think_s: float = option(
        10.0,
        "mean seconds from an answer to the next message of its user",
        group="workload",
        everyday=True,
        low=0.0,
    )
    shared: int = option(
        0,
        "tokens at the beginning of each chat that are the same for all users",
        group="workload",
        everyday=True,
        low=0,
    )
    requests: int = option(
        120,
        "requests in a simulation; of a trace the first ones, 0: all",
        group="workload",
        low=0,
    )
    slo_ttft: float = option(
        1.0,
        "a request is good if its first token comes within this number of seconds; 0: any",
        group="workload",
        everyday=True,
        low=0.0,
    )
    slo_itl: float = option(
        0.1,
        "and if the mean time between its tokens is at most this number of seconds; 0: any",
        group="workload",
        everyday=True,
        low=0.0,
    )
    slo_share: float = option(
        0.95,
        "part of the requests that must be good",
        group="workload",
        low=0.01,
        high=1.0,
    )

    @property
    def wanted(self) -> TrialSettings:
        return TrialSettings(
            Slo(self.slo_ttft or float("inf"), self.slo_itl or float("inf")), self.slo_share
        )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    cost: str = option(
        "",
        "plan for another machine: a file that weft plan --json has written there",
        group="plan",
        everyday=True,
    )
    compare: str = option(
        "",
        "options of weft serve to compare that change what a step costs, each measured: "
        "quantize=none,int8 kv_dtype=auto,int8; several give all combinations",
        group="plan",
        everyday=True,
    )
    confirm: bool = option(
        True,
        "run the best three settings for real, and rank them by that",
        group="plan",
        everyday=True,
    )
    confirm_s: float = option(
        20.0, "about how long each of these runs takes", group="plan", low=1.0, high=3_600.0
    )
    measure_s: float = option(
        20.0,
        "about how long the machine is measured, without loading the model",
        group="plan",
        everyday=True,
        low=1.0,
        high=3_600.0,
    )
    search_s: float = option(
        25.0, "time for the search; the best so far counts", group="plan", low=1.0, high=86_400.0
    )
    machines: int = option(
        1,
        "also plan for this number of machines and a router",
        group="plan",
        everyday=True,
        low=1,
        high=256,
    )
    price_per_hour: float = option(
        0.0,
        "price of one machine for an hour; prints that of a million output tokens",
        group="plan",
        everyday=True,
        low=0.0,
    )
    json: str = option(
        "",
        "file for the answer as JSON, with the measured machine (- is standard output)",
        group="plan",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )
    plot: str = option(
        "",
        "file for the curve (SVG)",
        group="plan",
        everyday=True,
        judge="weft.cli.capacity.svg:wrong_svg",
    )
    toml: str = option(
        "",
        "file for the settings, for weft serve --config",
        group="plan",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )
