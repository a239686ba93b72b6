"""The guess for classes that never ran."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.parameter_model import Parameters, fit, parameter_count, parameters_of, predict
from ci.policy import Policy
from matrix.cell import Cell, Layout
from matrix.generate import cells
from matrix.space import load_space

SPACE = load_space()
CELLS = cells(SPACE)
ALL = {cell: parameters_of(cell, SPACE.model(cell.model)) for cell in CELLS}


def true_seconds(cell: Cell) -> float:
    experts = SPACE.model(cell.model).shape.num_experts
    return (
        3.0
        * {"off": 1.0, "client": 1.4, "daemon": 1.7}[cell.mode]
        * 1.8 ** (cell.layout.tp - 1)
        * (1.3 if experts else 1.0)
    )


def points(noise: float = 0.0, left_out: Cell | None = None) -> list[tuple[Parameters, float]]:
    rng = random.Random(5)
    return [(ALL[cell], true_seconds(cell) * math.exp(rng.gauss(0, noise))) for cell in CELLS if cell != left_out]


def test_a_class_left_out_is_predicted_from_the_others() -> None:
    for cell in CELLS:
        fitted = fit(points(0.03, cell))
        assert fitted is not None
        guess = predict(fitted, ALL[cell])
        assert guess.outside == ()
        assert guess.seconds == pytest.approx(true_seconds(cell), rel=0.15), cell.id


def test_the_error_shown_is_of_classes_it_has_not_seen() -> None:
    exact, loose = fit(points()), fit(points(0.3))
    assert exact is not None
    assert loose is not None
    assert exact.worst_error < 0.15 < loose.median_error
    assert exact.median_error <= exact.worst_error
    assert loose.worst >= loose.upper > exact.upper >= 1
    by_hand = []
    given = points(0.3)
    for at, (parameters, seconds) in enumerate(given):
        without = fit(given[:at] + given[at + 1 :])
        assert without is not None
        by_hand.append(abs(predict(without, parameters).seconds / seconds - 1))
    assert loose.worst_error == pytest.approx(max(by_hand), rel=1e-6)


def test_too_few_classes_predict_nothing() -> None:
    least = Policy().model_min_classes
    assert fit(points()[: least - 1]) is None
    few = fit(points()[:least])
    assert few is not None
    assert len(few.names) <= least // 2 - 1, "two classes for each parameter"


def test_what_no_reading_has_shown_is_named() -> None:
    fitted = fit([(ALL[cell], true_seconds(cell)) for cell in CELLS if cell.mode != "daemon"])
    assert fitted is not None
    known = Cell("qwen3-tiny", Layout(tp=2), "client", "shm")
    assert predict(fitted, ALL[known]).outside == ()
    other_mode = Cell("qwen3-tiny", Layout(tp=2), "daemon", "shm")
    assert predict(fitted, ALL[other_mode]).outside == ("mode=daemon",)
    more_ranks = Cell("qwen3-tiny", Layout(tp=8), "client", "shm")
    assert predict(fitted, parameters_of(more_ranks, SPACE.model("qwen3-tiny"))).outside == ("tp",)


@given(st.lists(st.floats(0, 1e4), min_size=6, max_size=len(CELLS)))
def test_any_times_give_numbers(seconds: list[float]) -> None:
    fitted = fit([(ALL[cell], one) for cell, one in zip(CELLS, seconds, strict=False)])
    assert fitted is not None
    assert all(math.isfinite(one) for one in (*fitted.coefficients, fitted.median_error, fitted.upper))
    assert all(predict(fitted, one).seconds > 0 for one in ALL.values())


def test_parameter_count_is_that_of_the_checkpoint() -> None:
    shape = SPACE.model("qwen3-tiny").shape
    embeddings, attention, dense = 503 * 64, 2 * 64 * 16 * (4 + 2 + 2 + 4), 2 * 3 * 64 * 128
    assert parameter_count(shape) == embeddings + attention + dense
