"""Static against continuous batching."""

from __future__ import annotations

from dataclasses import dataclass

from weft.bench import batching
from weft.cli.benches.report import write_json
from weft.cli.benches.testbed import Testbed
from weft.cli.sim import VOCAB_SIZE, read_cost
from weft.config.engine import EngineConfig
from weft.config.options import Settings, option
from weft.scheduler.settings import SchedulerSettings
from weft.sim.run import Record, simulate
from weft.sim.synthetic import at_once
from weft.sim.table import number, table
from weft.sim.trace import EOS


@dataclass(frozen=True, kw_only=True)
class BatchingBench:
    simulate: bool = option(
        False, "in virtual time, with the cost model", group="bench", everyday=True
    )
    cost: str = option("gpu", "of the simulation, as for weft sim", group="bench", everyday=True)
    mix: str = option(
        "uniform",
        "how mixed outputs are spread between 100 and 1000",
        group="bench",
        everyday=True,
        choices=tuple(batching.MIXES),
    )
    scale: float = option(
        1.0,
        "outputs so many times as long as 100 to 1000",
        group="bench",
        everyday=True,
        low=0.01,
        high=10,
    )
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


def bench_batching(settings: Settings) -> int:
    options, config = settings.make(BatchingBench), settings.make(EngineConfig)
    scenes = batching.scenes(options.mix, options.scale)

    def mixes(policy: str) -> bool:
        """A static batch that decoded before it is complete would stay incomplete."""
        return config.mixed_chunk and policy != batching.STATIC

    if options.simulate:
        cost, summary = read_cost(options.cost), f"simulated, --cost {options.cost}"

        def play(scene: batching.Scene, policy: str) -> Record:
            return simulate(
                _simulated(scene, policy, mixed_chunk=mixes(policy)), cost, at_once(scene.lengths)
            )
    else:
        testbed = Testbed.of(config)
        summary = testbed.summary

        def play(scene: batching.Scene, policy: str) -> Record:
            num_rows = min(scene.num_rows, testbed.settings.max_running_requests)
            arrivals = at_once(scene.lengths, first_key=testbed.new_key)
            return testbed.play(
                arrivals, policy=policy, max_running_requests=num_rows, mixed_chunk=mixes(policy)
            )

    comparisons = batching.compare(scenes, lambda scene, policy: _trial(play(scene, policy)))
    rows = [
        [
            each.scene.name,
            *map(number, (each.static.output_per_s, each.continuous.output_per_s)),
            f"{each.ratio:.2f} x",
            f"{each.scene.goal:g} x",
            "met" if each.is_met else "missed",
            f"{each.static.row_use:.0%}",
            f"{each.continuous.row_use:.0%}",
        ]
        for each in comparisons
    ]
    header = [
        "",
        "static tok/s",
        "continuous",
        "ratio",
        "goal",
        "",
        "rows used, static",
        "continuous",
    ]
    print(summary)
    print(table(header, rows))
    print(*(f"{each.scene.name}: {each.why}" for each in comparisons), sep="\n")
    results = [
        {
            "scene": each.scene.name,
            "ratio": each.ratio,
            "goal": each.scene.goal,
            "why": each.why,
            "static": each.static._asdict(),
            "continuous": each.continuous._asdict(),
        }
        for each in comparisons
    ]
    write_json(
        options.json,
        "batching",
        {"engine": summary, "mix": options.mix, "scale": options.scale},
        results,
    )
    return 0


def _simulated(scene: batching.Scene, policy: str, *, mixed_chunk: bool) -> SchedulerSettings:
    """Settings with memory for all rows of a scene."""
    longest = max(map(sum, scene.lengths))
    return SchedulerSettings(
        num_pages=(longest // 16 + 2) * scene.num_rows,
        page_size=16,
        max_running_requests=scene.num_rows,
        context_length=longest,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        policy=policy,
        chunked_prefill_size=2_048,
        mixed_chunk=mixed_chunk,
    )


def _trial(record: Record) -> batching.Trial:
    meter, total_s = record.meter, float(record.end_s.max() - record.sent_s.min())
    return batching.Trial(
        output_per_s=int(record.output_len.sum()) / total_s,
        row_use=meter.mean_rows / record.num_rows,
        rows_per_step=meter.num_decode_rows / meter.num_decodes,
        decode_step_s=meter.decode_s / meter.num_decodes,
        decode_share=meter.decode_s / total_s,
    )
