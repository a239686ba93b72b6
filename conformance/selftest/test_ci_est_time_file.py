"""`ci/est_time.json`: read as written, stable, never half written."""

from __future__ import annotations

import os
import re
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.est_time_file import EstTimeFileError, encode_est_times, read_est_times, write_est_times
from ci.estimate import Estimate

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
above_0 = st.floats(0.1, 1e5)
estimates = st.builds(
    Estimate,
    est_time=above_0,
    timeout=st.integers(0, 10**6),
    launch=st.none() | above_0,
    state=st.sampled_from(["measured", "shifted", "few", "modelled", "declared"]),
    readings=st.integers(0, 15),
    last=st.none() | st.dates(),
    why=names | st.just(""),
)
all_times = st.dictionaries(names, st.dictionaries(names, estimates, min_size=1, max_size=3), max_size=3)


@given(all_times)
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, times: dict[str, dict[str, Estimate]]
) -> None:
    path = tmp_path_factory.mktemp("times") / "est_time.json"
    assert write_est_times(path, times)
    assert read_est_times(path) == times
    assert not write_est_times(path, times), "the same content is no change"
    turned = {machine: dict(reversed(classes.items())) for machine, classes in reversed(times.items())}
    assert encode_est_times(turned) == path.read_bytes(), "the order they come in makes no difference"


def test_a_change_of_one_class_changes_its_lines_alone() -> None:
    times = {"cpu-2core": {name: Estimate(10.0, 60, last=date(2026, 12, 1)) for name in ("A", "B", "C")}}
    before = encode_est_times(times).splitlines()
    after = encode_est_times(
        {"cpu-2core": times["cpu-2core"] | {"B": Estimate(20.0, 60, last=date(2026, 12, 1))}}
    ).splitlines()
    assert [(one, two) for one, two in zip(before, after, strict=True) if one != two] == [
        (b'        "est_time": 10.0,', b'        "est_time": 20.0,')
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Input data was truncated"),
        (b'{"format": 1, "machines": {', "Input data was truncated"),
        (b'{"machines": {}}', "Object missing required field `format`"),
        (b'{"format": 2, "machines": {}}', "format is 2; this version reads 1"),
        (b'{"format": 1, "machines": {}, "surprise": 1}', "Object contains unknown field `surprise`"),
        (b'{"format": 1, "machines": {"a": {"T": {"est_time": "1", "timeout": 60}}}}', "Expected `float`, got `str`"),
        (
            b'{"format": 1, "machines": {"a": {"T": {"est_time": 0, "timeout": 60}}}}',
            "a/T: est_time 0.0, timeout 60; both",
        ),
        (
            b'{"format": 1, "machines": {"a": {"T": {"est_time": 1, "timeout": -1}}}}',
            "a/T: est_time 1.0, timeout -1; both",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "est_time.json"
    path.write_bytes(content)
    with pytest.raises(EstTimeFileError, match=f"^{re.escape(f'{path}: {message}')}[^\n]*$"):
        read_est_times(path)


def test_a_missing_file_is_nothing_only_where_that_is_allowed(tmp_path: Path) -> None:
    assert read_est_times(tmp_path / "nix.json", missing_ok=True) == {}
    with pytest.raises(EstTimeFileError, match=r"nix\.json: no such file; `python -m ci\.calibrate --write` makes it"):
        read_est_times(tmp_path / "nix.json")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "est_time.json"
    write_est_times(path, {"a": {"T": Estimate(1.0, 60)}})
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_est_times(path, {"a": {"T": Estimate(2.0, 60)}})
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [path.name], "and no draft"
