"""Comparisons of outputs: what is asked of an engine, and what counts as equal or near."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from conformance.check import Check
from conformance.checkpoints import Answer
from conformance.outputs import Output, Tolerance, difference, distance, measure, pack, unpack
from conformance.requirement import Requirement
from conformance.targets.http import BadReply, Generated, MetaInfo

VOCAB = 5
PROMPT, OUTPUT = (3, 1, 4), (0, 2)
POSITIONS = len(PROMPT) + len(OUTPUT) - 1


def logprobs() -> np.ndarray:
    values = np.random.default_rng(1).normal(size=(POSITIONS, VOCAB))
    return (values - np.log(np.exp(values).sum(-1, keepdims=True))).astype(np.float32)


ANSWER = Answer(PROMPT, OUTPUT, logprobs())


class Engine:
    """Replies as an engine would, with a change to some field of `meta_info`."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def generate(self, input_ids: list[int], **options: Any) -> Generated:
        assert input_ids == list(PROMPT)
        assert options == {"max_new_tokens": len(OUTPUT), "top_logprobs_num": VOCAB}
        rows = [[(float(value), token, None) for token, value in enumerate(row)] for row in logprobs()]
        tokens = [*PROMPT[1:], *OUTPUT]
        chosen = [rows[position][token] for position, token in enumerate(tokens)]
        meta = {
            "finish_reason": {"type": "length"},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "input_token_logprobs": [(None, PROMPT[0], None), *chosen[:2]],
            "output_token_logprobs": chosen[2:],
            "input_top_logprobs": [None, *rows[:2]],
            "output_top_logprobs": rows[2:],
        }
        return Generated("", list(OUTPUT), MetaInfo(**meta | self.changes))


def test_measure_reads_every_position() -> None:
    (output,) = measure(Engine(), [ANSWER], VOCAB)  # type: ignore[arg-type]
    assert output.output_ids == OUTPUT
    assert np.array_equal(output.logprobs, logprobs())
    assert distance([ANSWER], [output], whole=True) == Tolerance(0.0, 0.0)


ROWS = [[(-1.0, token, None) for token in range(VOCAB)] for _ in range(2)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"output_top_logprobs": ROWS[:1]}, "4 positions expected, got 3"),
        ({"input_token_logprobs": None}, "4 positions expected, got 4 positions with 2"),
        ({"output_top_logprobs": [ROWS[0][:4], ROWS[1]]}, "top_logprobs_num 5 gave 4"),
        ({"output_top_logprobs": [[ROWS[0][0]] * 5, ROWS[1]]}, "gave 1 different"),
        ({"output_top_logprobs": ROWS}, "alone"),
        ({"output_token_logprobs": [(-1.0, 1, None), (-1.0, 1, None)], "output_top_logprobs": ROWS}, "other tokens"),
        ({"input_token_logprobs": [(None, 3, None), (None, 1, None), (-1.0, 4, None)]}, "alone"),
    ],
)
def test_measure_refuses_what_contradicts_itself(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadReply, match=told):
        measure(Engine(**changes), [ANSWER], VOCAB)  # type: ignore[arg-type]


def test_one_bit_is_a_difference() -> None:
    output = Output(OUTPUT, logprobs())
    assert difference([output], [Output(OUTPUT, logprobs())]) is None
    changed = logprobs()
    changed.view(np.uint32)[2, 3] ^= 1
    assert "position 2, token 3" in str(difference([output], [Output(OUTPUT, changed)]))
    assert "tokens [0, 2] and [0, 1]" in str(difference([output], [Output((0, 1), logprobs())]))


def test_zero_signs_and_nans_are_differences() -> None:
    one, two = logprobs(), logprobs()
    one[0, 0], two[0, 0] = 0.0, -0.0
    assert difference([Output(OUTPUT, one)], [Output(OUTPUT, two)]) is not None
    two[0, 0] = np.nan
    far = distance([ANSWER], [Output(OUTPUT, two)], whole=True)
    assert (far.largest, far.mean) == (np.inf, np.inf)


def test_distance_of_prompt_positions_alone() -> None:
    changed = logprobs()
    changed[-1, 0] += 1
    assert distance([ANSWER], [Output(OUTPUT, changed)], whole=False) == Tolerance(0.0, 0.0)
    assert distance([ANSWER], [Output(OUTPUT, changed)], whole=True).largest == pytest.approx(1)
    changed[2, 0] -= 2
    assert distance([ANSWER], [Output(OUTPUT, changed)], whole=False).largest == pytest.approx(2)


def test_pack_keeps_every_bit() -> None:
    outputs = [Output(OUTPUT, logprobs()), Output((1,), logprobs()[:2])]
    assert difference(outputs, unpack(pack(outputs))) is None


def failure(**arguments: Any) -> str:
    requirement = Requirement("WC-SELF-001", "must", "Something is done.", "Something comes.")
    check = Check("model/tp1/off/private", requirement, "pytest 'x::y'", "/logs/x")
    with pytest.raises(pytest.fail.Exception) as caught:
        check.equal("sources", **arguments)
    return str(caught.value)


def test_failure_tells_the_whole_story() -> None:
    lines = failure(expected=["cache"], got=["disk"]).splitlines()
    told = {line[:13].strip(): line[13:] for line in lines}
    assert told == {
        "requirement": "WC-SELF-001 (must): Something is done. Something comes.",
        "what": "sources",
        "expected": "['cache']",
        "got": "['disk']",
        "cell": "model/tp1/off/private",
        "alone": "pytest 'x::y'",
        "log": "/logs/x",
    }


def test_failure_shows_only_entries_that_differ() -> None:
    text = failure(expected={"a": 1, "b": 2, "c": 3}, got={"a": 1, "b": 4})
    assert "sources: 2 of 3 differ" in text
    assert "b: 2" in text
    assert "b: 4" in text
    assert "c: absent" in text
    assert "a: 1" not in text


def test_answers_of_other_shape_are_not_compared() -> None:
    short = dataclasses.replace(ANSWER, logprobs=ANSWER.logprobs[:2])
    with pytest.raises(ValueError, match="broadcast"):
        distance([short], [Output(OUTPUT, logprobs()[:3])], whole=False)
