from __future__ import annotations

from pathlib import Path

import pytest

from weft.config.options import SettingsError
from weft.sim.files import read_trace
from weft.sim.trace import Arrival, Prompt, Segment

BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
50,GPT-4,417,0,417,API log
118,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 9]}
"""


def segments(arrival: Arrival) -> Prompt:
    assert not isinstance(arrival.prompt, bytes)
    return arrival.prompt


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trace"
    path.write_text(text)
    return str(path)


def test_burst_gpt_gives_its_requests_without_those_that_failed(tmp_path: Path) -> None:
    arrivals = list(read_trace(write(tmp_path, BURST_GPT), max_tokens=100))
    assert [
        (a.time_s, a.prompt_len, a.output_len, a.max_new_tokens, a.tenant) for a in arrivals
    ] == [
        (0, 472, 18, 100, "ChatGPT"),
        (40, 1087, 230, 230, "ChatGPT"),
        (113, 417, 276, 276, "GPT-4"),
    ]
    assert len({segments(a)[0].key for a in arrivals}) == 3


def test_mooncake_gives_blocks_of_512_tokens(tmp_path: Path) -> None:
    arrivals = list(read_trace(write(tmp_path, MOONCAKE), max_tokens=1))
    assert arrivals == [
        Arrival(0.0, (Segment(0, 512), Segment(1, 512), Segment(2, 76)), 52, 52),
        Arrival(2.5, (Segment(0, 512), Segment(9, 512)), 7, 7),
    ]


def test_speed_lets_requests_come_faster(tmp_path: Path) -> None:
    arrivals = list(read_trace(write(tmp_path, MOONCAKE), max_tokens=1, speed=2))
    assert [a.time_s for a in arrivals] == [0.0, 1.25]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n1,2\n", "line 1: there is no column 'Timestamp'; Timestamp, Model, "),
        ("[1]\n", "line 1: there is no column 'Timestamp'"),
        (BURST_GPT + "x,GPT-4,1,1,2,API log\n", "line 6: Timestamp is 'x'; a number is needed"),
        (BURST_GPT + "5,GPT-4\n", "line 6: Request tokens is None; a number is needed"),
        (
            BURST_GPT + "5,GPT-4,1,-1\n",
            "line 6: Response tokens is '-1'; 0 to 16,777,216 are allowed",
        ),
        (
            BURST_GPT + "5,GPT-4,2147483000,1\n",
            "line 6: Request tokens is '2147483000'; 0 to 16,777,216 are allowed",
        ),
        (MOONCAKE + '{"timestamp": 0}', "line 3: input_length is None; a number is needed"),
        (
            MOONCAKE.replace("1024", "NaN"),
            "line 2: input_length is nan; a finite number is needed",
        ),
        (MOONCAKE.replace("[0, 9]", '["a", 9]'), "line 2: hash_ids is ['a', 9]; a list of whole"),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "line 1: hash_ids has the length 1; 2 is expected for 600 tokens",
        ),
        (MOONCAKE + '{"timestamp": 0,', "line 3: it is not valid JSON"),
        (MOONCAKE + "[1]", "line 3: it is [1]; an object is needed"),
    ],
)
def test_a_wrong_line_is_named_with_its_field_and_what_is_needed(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(SettingsError, match="neither BurstGPT") as caught:
        list(read_trace(write(tmp_path, text), max_tokens=1))
    assert why in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", BURST_GPT.splitlines()[0]])
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="has no requests; 1 or more are needed"):
        list(read_trace(write(tmp_path, text), max_tokens=1))


def test_missing_file_is_a_settings_error() -> None:
    with pytest.raises(SettingsError) as caught:
        list(read_trace("/nowhere/trace.csv", max_tokens=1))
    told = "cannot read the trace /nowhere/trace.csv: No such file or directory"
    assert str(caught.value) == told
