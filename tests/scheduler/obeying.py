"""Outputs that obey the masks of their grammars."""

from __future__ import annotations

import numpy as np

from tests.scheduler.oracle_runner import OracleRunner
from weft.plan.logits import FixedTokens, ProcessorCall
from weft.plan.step import Plan, Result, find


def calls(plan: Plan) -> list[ProcessorCall]:
    return [op for op in plan.logits if isinstance(op, ProcessorCall)]


def obey(runner: OracleRunner) -> list[Plan]:
    """From now on the oracle takes fixed tokens, and the processor "breaks" fails at its third
    token. Returns the plans that ran."""
    execute = runner.execute
    plans = []

    def run(plan: Plan) -> Result:
        plans.append(plan)
        tokens = execute(plan).tokens.copy()
        rows = np.repeat(plan.rows, plan.num_sampled)
        if (fixed := find(plan.logits, FixedTokens)) is not None:
            tokens[fixed.index] = fixed.tokens
            runner.last[rows[fixed.index]] = fixed.tokens
        invalid = np.zeros(len(tokens), dtype=np.bool_)
        faults = []
        for one in calls(plan):
            for i, seen, start in zip(one.index.tolist(), one.tokens, one.prompt_lens, strict=True):
                if one.name == "breaks" and len(seen) - start == 2:
                    invalid[i] = True
                    faults.append((i, "it broke"))
        return Result(tokens=tokens, invalid=invalid if faults else None, faults=tuple(faults))

    runner.execute = run  # type: ignore[method-assign]
    return plans
