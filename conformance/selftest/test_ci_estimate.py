"""From readings to `est_time` and `timeout`: what counts, what moves them, what doesn't."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from datetime import date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.estimate import Estimate, Policy, estimate, rounded, timeout_class
from ci.level import choose, latest_shift
from ci.quantile import quantile
from conformance.selftest.ci_samples import AS_OF, reading, series, stages

POLICY = Policy()
seconds = st.floats(0.05, 5000)


def made(*args: object, **kwargs: object) -> Estimate:
    found = estimate(*args, **kwargs)  # type: ignore[arg-type]
    assert found is not None
    return found


def noisy(count: int, level: float = 100.0, sigma: float = 0.05, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, sigma)) for _ in range(count)]


def test_the_calibration_that_the_review_asked_for() -> None:
    """Three readings, 280, 277 and 292 s, where the old value was 100."""
    old = Estimate(est_time=100.0, timeout=0)
    new = made(series(280, 277, 292), AS_OF, previous=old)
    assert (new.est_time, new.timeout, new.state) == (300.0, 900, "measured")
    assert max(280, 277, 292) < new.est_time < 1.1 * 280, (
        "covers what was seen, and no more than a tenth above the middle"
    )
    assert new.why == (
        "100 s -> 300 s (+200 %): 3 readings of 277 s to 292 s, of which the 75th percentile is 286 s; "
        "widened by 5 % since there are only 3"
    )
    assert (new.readings, new.p50, new.p75, new.p90) == (3, 280.0, 286.0, 289.6)
    assert (new.first, new.last, new.changed) == (date(2026, 10, 1), date(2026, 10, 3), date(2026, 12, 1))
    assert made(series(280, 277, 292, 284, 279), AS_OF, previous=new).est_time == 300.0, (
        "the next readings make no diff"
    )


@given(st.lists(seconds, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_order_of_readings_makes_no_difference(values: list[float], rng: random.Random) -> None:
    readings = series(*values)
    shuffled = readings[:]
    rng.shuffle(shuffled)
    assert estimate(readings, AS_OF) == estimate([*shuffled, *readings], AS_OF), "nor does reading a file twice"


@given(st.lists(seconds, min_size=1, max_size=30))
def test_estimate_lies_among_its_readings(values: list[float]) -> None:
    chosen = choose(series(*values), AS_OF, POLICY)
    found = made(series(*values), AS_OF)
    used = [one.seconds.whole for one in chosen.used]
    assert rounded(min(used)) <= found.est_time <= max(0.1, rounded(max(used) * 1.5))
    assert found.timeout >= POLICY.timeout_factor * quantile(used, 0.9)
    assert found.readings == len(used) <= POLICY.window
    assert len(chosen.used) + len(chosen.left_out) == len(values)


@given(st.lists(seconds, min_size=1, max_size=20), st.floats(0, 1))
def test_quantile_is_the_inclusive_one(values: list[float], part: float) -> None:
    assert min(values) <= quantile(values, part) <= max(values)
    if len(values) > 1:
        assert quantile(values, 0.9) == pytest.approx(statistics.quantiles(values, n=10, method="inclusive")[8])


@given(st.lists(seconds, min_size=5, max_size=20))
def test_an_estimate_is_settled_by_its_own_readings(values: list[float]) -> None:
    first = made(series(*values), AS_OF)
    assert estimate(series(*values), AS_OF, previous=first) is first


def test_few_readings_widen_the_estimate() -> None:
    found = [made(series(*[100.0] * count), AS_OF) for count in range(1, 7)]
    assert [one.est_time for one in found] == [150, 125, 105, 104, 100, 100]
    assert [one.state for one in found] == ["few", "few", "measured", "measured", "measured", "measured"]
    assert "widened by 50 % since there is only 1" in found[0].why


@pytest.mark.parametrize(
    ("state", "kept"), [("declared", True), ("measured", True), ("few", False), ("modelled", False)]
)
def test_too_few_readings_do_not_replace_what_stands_on_more(state: str, kept: bool) -> None:
    old = Estimate(est_time=100.0, timeout=300, state=state)  # type: ignore[arg-type]
    assert (estimate(series(280, 277), AS_OF, previous=old) is old) is kept


def test_without_a_usable_reading_all_stays() -> None:
    old = Estimate(est_time=100.0, timeout=300)
    assert estimate([], AS_OF) is None
    assert estimate([], AS_OF, previous=old) is old
    assert estimate(series(5, 6, 7, outcome="failed"), AS_OF, previous=old) is old


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"outcome": "failed"}, "failed"),
        ({"outcome": "error"}, "error"),
        ({"outcome": "skipped"}, "skipped"),
        ({"attempt": 2}, "attempt 2: a retried run"),
        ({"seconds": stages(0)}, "0 s: not above 0"),
        ({"seconds": stages(-3)}, "-3 s: not above 0"),
        ({"seconds": stages(math.nan)}, "seconds that are no number"),
        ({"time": AS_OF + timedelta(days=1)}, "its clock is ahead: 2026-12-02 00:00 is after 2026-12-01 00:00"),
        ({"run_began": AS_OF}, "its clock went back: it ended before its run began (2026-12-01 00:00)"),
    ],
)
def test_what_is_no_measurement_is_kept_apart_with_its_reason(fields: dict[str, object], why: str) -> None:
    good = series(100, 101, 102)
    bad = reading(500.0, 30, **fields)
    chosen = choose([*good, bad], AS_OF, POLICY)
    assert list(chosen.used) == good
    assert [(one.reading, one.why) for one in chosen.left_out] == [(bad, why)]
    assert estimate([*good, bad], AS_OF) == estimate(good, AS_OF)


def test_clocks_that_differ_a_little_are_no_reason() -> None:
    near = reading(100.0, time=AS_OF + timedelta(seconds=30), run_began=AS_OF + timedelta(seconds=60))
    assert choose([near], AS_OF, POLICY).used == (near,)


def test_cold_caches_are_kept_apart_but_the_time_out_covers_them() -> None:
    warm = series(*noisy(10), warm=True)
    cold = [reading(900.0, 5.5, warm=False)]
    found = made([*warm, *cold], AS_OF)
    assert found.est_time == made(warm, AS_OF).est_time
    assert found.timeout == 1800
    slower = [reading(130.0, day + 0.5, warm=False) for day in range(0, 10, 2)]
    chosen = choose([*warm, *slower], AS_OF, POLICY)
    assert list(chosen.used) == warm
    assert {(one.why, one.passing) for one in chosen.left_out} == {("cold cache", True)}
    assert made(series(100, 101, 102, warm=False), AS_OF).readings == 3, "where all are cold, that is how it runs"


def test_a_busy_machine_is_kept_apart() -> None:
    usual = series(*noisy(10), load=0.4)
    busy = reading(240.0, 9.5, load=3.0)
    (left,) = choose([*usual, busy], AS_OF, POLICY).left_out
    assert (left.reading, left.why) == (busy, "busy machine: load 3 a core, usually 0.4")
    assert choose([reading(one, day, load=3.0) for day, one in enumerate(noisy(10))], AS_OF, POLICY).left_out == ()


def test_only_the_newest_count() -> None:
    chosen = choose(series(*[50.0] * 20, *noisy(15)), AS_OF, POLICY)
    assert len(chosen.used) == POLICY.window
    assert {one.why for one in chosen.left_out} == {"older than the newest 15"}


@pytest.mark.parametrize("stray", [20.0, 300.0, 5000.0])
@pytest.mark.parametrize("day", [0, 6, 11])
def test_a_stray_moves_nothing(stray: float, day: int) -> None:
    values = noisy(12)
    old = made(series(*values), AS_OF)
    values[day] = stray
    chosen = choose(series(*values), AS_OF, POLICY)
    assert chosen.shift is None
    assert [one.reading.seconds.whole for one in chosen.left_out] == [stray]
    assert estimate(series(*values), AS_OF, previous=old).est_time == old.est_time  # type: ignore[union-attr]


def test_frequent_strays_are_how_the_class_behaves() -> None:
    chosen = choose(series(*[100.0, 102, 99, 300] * 3, 101), AS_OF, POLICY)
    assert (chosen.left_out, chosen.shift) == ((), None)


@pytest.mark.parametrize("factor", [0.5, 1.4, 1.8, 3.0])
@pytest.mark.parametrize("since", [3, 5, 8])
def test_a_shift_moves_the_estimate_and_names_the_revision(factor: float, since: int) -> None:
    values = noisy(12, sigma=0.03)
    old = made(series(*values), AS_OF)
    shifted = [*values, *noisy(since, 100 * factor, sigma=0.03, seed=2)]
    new = made(series(*shifted), AS_OF, previous=old)
    assert (new.state, new.readings, new.shifted_by) == ("shifted", since, "rev12")
    assert new.est_time == pytest.approx(100 * factor, rel=0.12)
    assert "level shift from" in new.why
    assert "first seen at revision rev12 on 2026-10-13" in new.why


def test_a_sudden_rise_is_believed_of_two_runs_that_agree() -> None:
    values = noisy(12, sigma=0.03)
    assert latest_shift([*values, 200, 204], POLICY) == 12
    assert latest_shift([*values, 200], POLICY) is None, "one may be a stray"
    assert latest_shift([*values, 200, 420], POLICY) is None, "two that differ are two strays"
    assert latest_shift([*values, 50, 51], POLICY) is None, "a fall waits for the third"


def test_the_last_of_several_shifts_counts() -> None:
    assert latest_shift([100, 101, 99, 102, 200, 201, 199, 202, 120, 121, 119], POLICY) == 8


@given(st.integers(0, 10_000), st.floats(0.01, 0.2))
def test_noise_alone_is_seldom_a_shift(seed: int, sigma: float) -> None:
    """Of 40 series at once: a threshold that finds shifts in noise fails in most examples."""
    rng = random.Random(seed)
    found = sum(
        latest_shift([100 * math.exp(rng.gauss(0, sigma)) for _ in range(15)], POLICY) is not None for _ in range(40)
    )
    assert found <= 4


def test_noise_makes_no_diffs() -> None:
    """A year of nightly runs of a class that doesn't change: its estimate is written once, and settles."""
    values = noisy(365, sigma=0.08, seed=7)
    readings = series(*values)
    current, changes = None, 0
    for day in range(3, 365):
        new = made(readings[: day + 1][-40:], readings[day].time, previous=current)
        changes += new.est_time != (current.est_time if current else 0)
        current = new
    assert changes <= 3


def test_kept_numbers_get_new_statistics_once_a_month() -> None:
    old = made(series(*noisy(10)), AS_OF)
    later = [*series(*noisy(10)), *(reading(one, 20 + day) for day, one in enumerate(noisy(10, seed=3)))]
    assert estimate(later, AS_OF, previous=old) is old, "20 days"
    much_later = [*later, reading(100.0, 45)]
    new = made(much_later, AS_OF, previous=old)
    assert (new.est_time, new.timeout, new.why, new.changed) == (old.est_time, old.timeout, old.why, old.changed)
    assert new.last == date(2026, 11, 15)


@given(st.floats(0.01, 50_000))
def test_time_outs_are_classes(needed: float) -> None:
    found = timeout_class(needed)
    assert found >= needed
    assert found in POLICY.timeout_classes or found % 3600 == 0


@pytest.mark.parametrize(
    ("needed", "previous", "expected"), [(299, 300, 300), (301, 300, 900), (290, 900, 900), (239, 900, 300)]
)
def test_a_time_out_does_not_flap(needed: float, previous: int, expected: int) -> None:
    assert timeout_class(needed, POLICY, previous) == expected


def test_a_time_out_can_move_alone() -> None:
    old = replace(made(series(*[100.0] * 8), AS_OF), timeout=60)
    new = made(series(*[100.0] * 8), AS_OF, previous=old)
    assert (new.est_time, new.timeout) == (old.est_time, 300)
    assert new.why.startswith("time-out 60 s -> 300 s: ")


def test_readings_of_several_machines_or_classes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 machines \(cpu-2core, nvidia-h200\); an estimate is of one"):
        estimate([reading(1.0), reading(1.0, machine="cpu-2core")], AS_OF)
    with pytest.raises(ValueError, match=r"2 class_names \(TestX, TestY\)"):
        estimate([reading(1.0), reading(1.0, class_name="TestY")], AS_OF)


def test_times_without_a_zone_are_refused() -> None:
    with pytest.raises(ValueError, match="has no time zone"):
        estimate(series(1, 2, 3), datetime(2026, 12, 1))
    with pytest.raises(ValueError, match="has no time zone"):
        reading(1.0, time=datetime(2026, 12, 1))


def test_launch_and_tests_are_estimated_apart() -> None:
    slow_launch = [
        reading(100.0, day, seconds=replace_stages(launch, 30.0)) for day, launch in enumerate((50, 60, 70, 80, 90))
    ]
    found = made(slow_launch, AS_OF)
    assert (found.launch, found.tests) == (80.0, 30.0)
    unstaged = [reading(100.0, day, seconds=replace_stages(0.0, 100.0)) for day in range(5)]
    assert made(unstaged, AS_OF).launch is None


def replace_stages(launch: float, tests: float) -> object:
    import msgspec

    return msgspec.structs.replace(stages(100.0), launch=launch, tests=tests, teardown=0.0)


def test_a_guess_gives_way_to_the_first_measured_number_however_near() -> None:
    """One reading of 2 s is widened to 3 s; a second's room for noise must not keep that guess for ever."""
    guessed = estimate(series(2.0), AS_OF)
    assert guessed is not None
    assert (guessed.state, guessed.est_time) == ("few", 3.0)
    measured = estimate(series(*[2.0] * 6), AS_OF, previous=guessed)
    assert measured is not None
    assert (measured.state, measured.est_time) == ("measured", 2.0)
