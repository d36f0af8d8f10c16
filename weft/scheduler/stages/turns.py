"""Rows take turns, so that all pipeline stages of a model have work at once.

    stage 0    | 1 a | 2 b | 3 a | 4 b |        steps of requests a, and of requests b
    stage 1          | 1 a | 2 b | 3 a |

A row whose next token is being sampled is left out of a step, and a step takes at most its share of
the rows, so that rows are left for the next step. Rows form groups by themselves, because the rows
that were left out longest go first. Prompts need no turns: the next chunk of a prompt does not
depend on a sampled token.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.scheduler.request import Columns
from weft.scheduler.settings import SchedulerSettings


class StageTurns:
    def __init__(self, num_rows: int, settings: SchedulerSettings) -> None:
        self._num_stages = settings.num_stages
        self._most = settings.max_stage_rows or num_rows
        # Values when a row was last looked at: if they have changed, the row has had a turn.
        self._lens = np.full(num_rows, -1, np.int32)
        self._epochs = np.full(num_rows, -1, np.int32)
        # number of the look at which each row had its last turn
        self._turns = np.zeros(num_rows, np.int64)
        self._num_looks = 0

    def take(self, columns: Columns, rows: IntArray) -> IntArray:
        """At most their share of the rows."""
        self._note_turns(columns, rows)
        idle = rows[columns.known_len[rows] >= columns.seq_len[rows]]
        share = min(-(-len(rows) // self._num_stages), self._most)
        if len(idle) <= share:
            return idle
        first = np.argsort(self._turns[idle], kind="stable")[:share]
        return idle[np.sort(first)]

    def beside_drafts(
        self, columns: Columns, rows: IntArray, counts: IntArray
    ) -> tuple[IntArray, IntArray]:
        return rows, counts

    def _note_turns(self, columns: Columns, rows: IntArray) -> None:
        self._num_looks += 1
        lens = columns.seq_len[rows]
        epochs = columns.epoch[rows]
        had_turn = rows[(self._lens[rows] != lens) | (self._epochs[rows] != epochs)]
        self._turns[had_turn] = self._num_looks
        self._lens[rows] = lens
        self._epochs[rows] = epochs
