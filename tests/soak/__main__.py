"""`python -m tests.soak --minutes 20 --seed 1`: prints a table, and ends with 1 if anything was
wrong.

`--schedules 10000` runs so many random schedules of models with windows and states instead, without
a server; `--stored 200` so many with a store of KV that answers late, wrongly or never, and with
pinned prompts; `--planted` plants faults into the server, and ends with 1 if one is not noticed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from tests.soak.driver import soak
from tests.soak.planted import try_all
from tests.soak.report import as_json, as_table
from tests.soak.schedules import run_schedules, run_stored


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="soak", description="Random load with faults on a real server, and audits."
    )
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="how long; a run ends with the round it is in"
    )
    parser.add_argument("--seed", type=int, default=1, help="of all that is random")
    parser.add_argument(
        "--model", default="", help="a model's folder; the bundled one if not given"
    )
    parser.add_argument("--phase-s", type=float, default=20.0, help="seconds of a phase")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of outputs")
    parser.add_argument("--json", default="", help="file for the figures")
    parser.add_argument(
        "--schedules",
        type=int,
        default=0,
        help="without a server: so many random schedules with windows and states, and all checks",
    )
    parser.add_argument(
        "--stored",
        type=int,
        default=0,
        help="without a server: so many random schedules with a store of KV that answers late, wrongly or never",
    )
    parser.add_argument(
        "--planted", action="store_true", help="try whether the run notices faults that are planted"
    )
    args, options = parser.parse_known_args()
    if args.planted:
        return 1 if try_all() else 0
    if args.stored:
        run_stored(args.stored, args.seed)
        return 0
    if args.schedules:
        run_schedules(args.schedules, args.seed)
        return 0
    found = as_json(
        asyncio.run(soak(args.minutes, args.seed, args.model, options, args.phase_s, args.scale))
    )
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    print(as_table(found))
    return 1 if found["num_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
