"""A running server, over HTTP."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from weft.bench import serving
from weft.bench.http import HttpError, Server
from weft.bench.workloads import WORKLOADS
from weft.cli.benches.report import percentiles, write_json
from weft.config.options import Settings, SettingsError, option
from weft.server.serve import run as run_loop
from weft.sim.table import number, table


@dataclass(frozen=True, kw_only=True)
class ServingBench:
    url: str = option(
        "http://127.0.0.1:30000", "server with an OpenAI API", group="bench", everyday=True
    )
    model: str = option(
        "", "model to ask for; the server's first if not given", group="bench", everyday=True
    )
    requests: int = option(100, "how many", group="bench", everyday=True, low=1)
    rate: float = option(
        0.0,
        "requests a second (Poisson); 0: see --concurrency",
        group="bench",
        everyday=True,
        low=0,
    )
    concurrency: int = option(
        16, "open requests at most; 0: any number", group="bench", everyday=True, low=0
    )
    input_len: int = option(128, "tokens of each prompt", group="bench", everyday=True, low=1)
    output_len: int = option(128, "tokens of each completion", group="bench", everyday=True, low=1)
    shared_len: int = option(
        0, "of the prompt, the same in all requests", group="bench", everyday=True, low=0
    )
    workload: str = option(
        "", "instead: one of w1 to w5, all requests at once", group="bench", everyday=True
    )
    seed: int = option(
        0, "of the prompts: another one shares nothing with what is cached", group="bench"
    )
    api_key: str = option("", "key of the server", group="bench", everyday=True)
    json: str = option("", "file for the figures as JSON", group="bench", everyday=True)


def bench_serving(settings: Settings) -> int:
    options = settings.make(ServingBench)
    load = serving.Load(
        num_requests=options.requests,
        input_len=options.input_len,
        output_len=options.output_len,
        rate=options.rate,
        concurrency=options.concurrency,
        shared_len=min(options.shared_len, options.input_len),
        model=options.model,
        seed=options.seed,
    )
    if options.workload:
        if options.workload not in WORKLOADS:
            raise SettingsError(
                f"there is no workload {options.workload!r}; there are {', '.join(WORKLOADS)}"
            )
        load = replace(load, jobs=WORKLOADS[options.workload].jobs, concurrency=0, rate=0.0)
    try:
        outcome = run_loop(serving.run(Server(options.url, options.api_key), load))
    except HttpError as exc:
        raise SettingsError(str(exc)) from exc
    answered = outcome.answered
    failed = [call for call in outcome.calls if call.error]
    if failed:
        print(
            f"{len(failed)} of {len(outcome.calls)} requests failed, the first with: {failed[0].error}"
        )
    if not answered:
        return 1
    times = {
        "TTFT ms": [call.ttft_s for call in answered],
        "ITL ms": [gap for call in answered for gap in call.itl_s],
        "E2E ms": [call.e2e_s for call in answered],
    }
    found = {name: percentiles(values) for name, values in times.items()}
    print(
        f"{len(answered):,} requests in {outcome.total_s:.1f} s: {number(outcome.requests_per_s)} a second"
    )
    print(f"{number(outcome.output_per_s)} output tokens a second")
    print(
        table(["", "p50", "p90", "p99"], [[name, *map(number, row)] for name, row in found.items()])
    )
    results = {
        "requests_per_s": outcome.requests_per_s,
        "output_per_s": outcome.output_per_s,
        "total_s": outcome.total_s,
        "num_failed": len(failed),
        "percentiles": {
            name: dict(zip(("p50", "p90", "p99"), row, strict=True)) for name, row in found.items()
        },
    }
    write_json(options.json, "serving", asdict(load), results)
    return 1 if failed else 0
