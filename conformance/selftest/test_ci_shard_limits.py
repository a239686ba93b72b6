"""`python -m ci.shard`: deadlines, the split there was, and bad input, which ends in one line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from conformance.selftest.shard_command import SMOKE, Run

pytest_plugins = ["conformance.selftest.shard_command"]


# deadlines and runners


def test_a_deadline_takes_as_few_runners_as_meet_it(run: Run, times: Path) -> None:
    done = run("--classes", times, "--deadline", 35, "--format", "json")
    split = json.loads(done.out)
    assert (split["runners"], split["runners_at_least"], split["makespan"]) == (2, 2, 35.0)
    with_start = json.loads(run("--classes", times, "--deadline", 35, "--overhead", 5, "--format", "json").out)
    assert (with_start["runners"], with_start["makespan"]) == (3, 35.0)


def test_a_limit_that_one_class_exceeds(run: Run, times: Path) -> None:
    done = run("--classes", times, "--deadline", 25, "--runners", 9)
    assert (done.status, done.out) == (1, "")
    assert "tests/test_a.py::TestA alone takes 30 s" in done.err


def test_a_limit_that_there_are_too_few_runners_for(run: Run, times: Path) -> None:
    done = run("--classes", times, "--deadline", 31, "--runners", 2)
    assert (done.status, done.out) == (1, "")
    assert "on 2 runners: it needs 3 (at least 3)" in done.err


def test_a_limit_below_the_start(run: Run, times: Path) -> None:
    done = run("--classes", times, "--deadline", 31, "--overhead", 31)
    assert done.status == 1
    assert "a runner's start alone takes 31 s" in done.err


def test_more_runners_than_classes(run: Run, times: Path) -> None:
    done = run("--classes", times, "--runners", 6, "--format", "nodeids")
    assert done.status == 0
    assert "6 runners for 4 classes: 2 stay without one" in done.err
    assert len(done.out.splitlines()) == 4, "pytest without node ids would run everything"


def test_an_empty_shard_is_no_shard(run: Run, times: Path) -> None:
    done = run("--classes", times, "--shard", "5/6")
    assert (done.status, done.out) == (3, "")
    assert "shard 5 is empty" in done.err


# staying near


def test_previous_and_save(run: Run, tmp_path: Path) -> None:
    kept = tmp_path / "split.json"
    first = run("--tier", "smoke", "--runners", 4, "--previous", kept, "--save", kept, "--format", "nodeids")
    assert "there is no previous split" in first.err
    second = run("--tier", "smoke", "--runners", 4, "--previous", kept, "--save", kept, "--format", "nodeids")
    assert second.out == first.out
    assert "; 0 classes moved" in second.err
    names = SMOKE[:-1]
    fewer = [argument for name in names for argument in ("--class", name)]
    third = run("--tier", "smoke", *fewer, "--runners", 4, "--previous", kept)
    assert f"1 of its classes are not split any more: {SMOKE[-1]}" in third.err


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "shards": []}', '{"format": 1, "shards": [{}]}'])
def test_a_previous_split_that_is_none(run: Run, times: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "split.json"
    path.write_text(text)
    done = run("--classes", times, "--runners", 2, "--previous", path)
    assert (done.status, done.out) == (2, "")
    assert re.fullmatch(r"ci\.shard: .*split\.json: .*\n", done.err)


# bad input


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("", "no classes to split"),
        ("# nothing\n\n", "no classes to split"),
        ("a 1\nb 2\na 3\n", r"times\.txt:3: class a is listed twice"),
        ("a 0\n", r"times\.txt:1: class a: 0 s given"),
        ("a 1\nb -2\n", r"times\.txt:2: class b: -2 s given"),
        ("a nan\n", r"class a: nan s given"),
        ("a 1O\n", r"times\.txt:1: '1O' is neither seconds nor a group"),
    ],
)
def test_lists_that_are_none(run: Run, times: Path, lines: str, text: str) -> None:
    times.write_text(lines)
    done = run("--classes", times, "--runners", 2)
    assert (done.status, done.out) == (2, "")
    assert re.search(text, done.err)
    assert done.err.count("\n") == 1


def a_list(*more: object) -> Iterable[object]:
    return ("--classes", "LIST", "--runners", 2, *more)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--tier", "smoke", "--runners", 2, "--class", SMOKE[0][:-1]), f"did you mean {SMOKE[0]}?"),
        (
            ("--tier", "smoke", "--runners", 2, "--class", "Zebra"),
            "unknown class Zebra: not in tier smoke; `matrix list`",
        ),
        (("--tier", "smoke", "--runners", 2, "--ranks", 7), "no classes to split"),
        (("--tier", "nightly", "--runners", 2), "no tier 'nightly'"),
        (("--tier", "smoke", "--runners", 2, "--saving", "modell=3"), "saving of modell: no class has such a group"),
        (("--classes", "/nonexistent/list", "--runners", 2), "/nonexistent/list: No such file"),
        (("--tier", "smoke", "--runners", 2, "--est-time", "/nonexistent/e"), "/nonexistent/e: no such file"),
        (a_list("--class", "a"), "with --classes, edit the list"),
        (a_list("--slack", "-1"), "slack: -1.0 given"),
        (a_list("--save", "/nonexistent/split.json"), "No such file"),
    ],
)
def test_bad_input_is_one_line(run: Run, times: Path, arguments: Iterable[object], text: str) -> None:
    done = run(*(times if one == "LIST" else one for one in arguments))
    assert (done.status, done.out) == (2, "")
    assert text in done.err
    assert done.err.splitlines()[-1].startswith("ci.shard: ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--runners", 2),
        ("--tier", "smoke"),
        ("--tier", "smoke", "--runners", 0),
        ("--tier", "smoke", "--runners", "two"),
        ("--tier", "smoke", "--shard", "3/2"),
        ("--tier", "smoke", "--shard", "0/2"),
        ("--tier", "smoke", "--shard", "2"),
        ("--tier", "smoke", "--shard", "1/2", "--runners", 2),
        ("--tier", "smoke", "--deadline", 0),
        ("--tier", "smoke", "--deadline", -5),
        ("--tier", "smoke", "--deadline", "nan"),
        ("--tier", "smoke", "--runners", 2, "--saving", "model"),
        ("--tier", "smoke", "--runners", 2, "--saving", "=3"),
        ("--tier", "smoke", "--runners", 2, "--saving", "model=-3"),
        ("--tier", "smoke", "--classes", "x", "--runners", 2),
    ],
)
def test_arguments_that_make_no_sense(run: Run, arguments: tuple[object, ...]) -> None:
    done = run(*arguments)
    assert (done.status, done.out) == (2, "")
    assert "error: " in done.err


def test_help_has_examples_that_work(run: Run) -> None:
    text = run("--help").out
    assert "exit status:" in text
    examples = re.findall(r"^  python -m ci\.shard (--tier .*?)(?:  .*)?$", text, re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        assert run(*shlex.split(example), "--default-seconds", 60).status == 0, example
