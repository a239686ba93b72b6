"""`python -m ci.shard`: what it emits is a partition of what there is, in each format; bad input ends in one line."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import pytest

from ci import shard, shard_plan
from ci.class_times import CELLS_MODULE, ClassTime, group_savings
from ci.est_time_file import write_est_times
from ci.estimate import Estimate
from ci.packing import Job, Packing
from ci.shard_formats import FORMATS, github
from ci.shard_plan import NotAPartitionError, Plan, Shard, check_partition, shards_of
from conformance.scheduler import unit_of
from conformance.selftest.test_ci_workflow import MATRIX_KEYS
from matrix.generate import cells
from matrix.space import load_space

ROOT = Path(__file__).parents[2]
KIND = "nvidia-h200"
SMOKE = [cell.class_name for cell in cells(load_space(), "smoke")]
NODEIDS = [f"{CELLS_MODULE}::{name}" for name in SMOKE]


@pytest.fixture
def est_time(tmp_path: Path) -> Path:
    """Estimates of all but the last class of the smoke tier, on one machine kind."""
    path = tmp_path / "est_time.json"
    states = itertools.cycle(["measured", "modelled"])
    write_est_times(
        path,
        {
            KIND: {
                name: Estimate(est_time=10.0 + number, timeout=300, state=next(states), changed=date(2026, 12, 1))  # type: ignore[arg-type]
                for number, name in enumerate(SMOKE[:-1])
            }
        },
    )
    return path


class Ran:
    """What a command gave back."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], est_time: Path) -> object:
    def call(*arguments: object) -> Ran:
        given = [str(one) for one in arguments]
        if "--tier" in given and "--est-time" not in given:
            given += ["--est-time", str(est_time), "--machine", KIND]
        try:
            status = shard.main(given)
        except SystemExit as error:
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return call


@pytest.fixture
def times(tmp_path: Path) -> Path:
    path = tmp_path / "times.txt"
    path.write_text("# a suite\ntests/test_a.py::TestA 30\ntests/test_b.py::TestB 20  # slow\n\nc 10\nd 5\n")
    return path


def nodeids_of(form: str, text: str) -> list[list[str]]:
    """Read the node ids of each shard back from what a format emits."""
    if form == "nodeids":
        return [shlex.split(line) for line in text.splitlines()]
    if form == "github":
        return [shlex.split(one["nodeids"]) for one in json.loads(text)["include"]]
    if form == "buildkite":
        commands = [step["command"].replace("$$", "$") for step in json.loads(text)["steps"]]
        return [_pytest_arguments(command) for command in commands]
    if form == "shell":
        return [_pytest_arguments(found) for found in re.findall(r"^  \d+\) exec (.*) ;;$", text, re.MULTILINE)]
    if form == "json":
        return [[one["nodeid"] for one in part["classes"]] for part in json.loads(text)["shards"]]
    raise AssertionError(form)


def _pytest_arguments(command: str) -> list[str]:
    python, dash_m, pytest_, *rest = shlex.split(command)
    assert (python, dash_m, pytest_) == ("python", "-m", "pytest")
    return rest[: rest.index("--tier")] if "--tier" in rest else rest


# what is emitted


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "table"])
@pytest.mark.parametrize("runners", [1, 3, 5, 12])
def test_each_format_holds_each_class_once(run: object, form: str, runners: int) -> None:
    done = run("--tier", "smoke", "--runners", runners, "--format", form)  # type: ignore[operator]
    assert done.status == 0
    shards = nodeids_of(form, done.out)
    assert len(shards) == runners
    assert all(shards)
    assert sorted(itertools.chain(*shards)) == sorted(NODEIDS)
    assert "predicted makespan" in done.err


def test_shards_are_what_the_whole_split_says(run: object) -> None:
    whole = nodeids_of("nodeids", run("--tier", "smoke", "--runners", 5, "--format", "nodeids").out)  # type: ignore[operator]
    parts = [run("--tier", "smoke", "--shard", f"{number}/5").out.split() for number in range(1, 6)]  # type: ignore[operator]
    assert parts == whole


@pytest.mark.parametrize("tier", ["smoke", "full"])
def test_shards_are_what_pytest_collects(run: object, tier: str) -> None:
    """On the real suite: the union is what is collected, and a shard collects its own classes."""

    def collect(*arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "--device", "cpu", "--tier", tier, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted({unit_of(line) for line in done.stdout.splitlines() if "::" in line})

    shards = nodeids_of("nodeids", run("--tier", tier, "--runners", 4, "--format", "nodeids").out)  # type: ignore[operator]
    check_partition(shards, collect("conformance/test_cells.py"))
    assert collect(*shards[0]) == sorted(shards[0])


def test_github_matrix(run: object) -> None:
    done = run("--tier", "smoke", "--runners", 3, "--format", "github", "--label", "self-hosted", "--label", "gpu")  # type: ignore[operator]
    assert done.out.count("\n") == 1, "GITHUB_OUTPUT takes one line"
    include = json.loads(done.out)["include"]
    assert all(one.keys() == MATRIX_KEYS for one in include)
    assert [one["name"] for one in include] == [f"{KIND} {number}/3" for number in (1, 2, 3)]
    assert all(one["runner"] == ["self-hosted", "gpu"] for one in include)
    assert all(one["timeout-minutes"] * 60 > one["seconds"] for one in include)
    one_label = json.loads(run("--tier", "smoke", "--runners", 3, "--format", "github", "--label", "a").out)  # type: ignore[operator]
    assert one_label["include"][0]["runner"] == "a"


def test_github_takes_no_more_than_256_jobs(run: object, tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("".join(f"class{number} 1\n" for number in range(257)))
    done = run("--classes", path, "--runners", 257, "--format", "github")  # type: ignore[operator]
    assert (done.status, done.out) == (2, "")
    assert "at most 256" in done.err


def test_buildkite_steps(run: object) -> None:
    steps = json.loads(
        run(
            "--tier", "smoke", "--runners", 2, "--format", "buildkite", "--label", "h200", "--pytest-args", "-k '$x'"
        ).out  # type: ignore[operator]
    )["steps"]
    assert [step["key"] for step in steps] == [f"conformance-{KIND}-1", f"conformance-{KIND}-2"]
    assert all(step["agents"] == {"queue": "h200"} for step in steps)
    assert all(step["command"].endswith(" --tier smoke -k '$$x'") for step in steps), "the agent expands a single $"
    assert all(step["timeout_in_minutes"] >= 1 for step in steps)


def test_shell_script_runs_the_shard_it_is_given(run: object, tmp_path: Path) -> None:
    times = tmp_path / "times"
    times.write_text("a::T[x;y] 2\nb's 1\n")
    script = tmp_path / "run.sh"
    script.write_text(run("--classes", times, "--runners", 2, "--format", "shell").out)  # type: ignore[operator]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor one in "$@"; do echo "$one"; done\n')
    python.chmod(0o755)
    seen = []
    for number in ("1", "2"):
        done = subprocess.run(
            ["sh", script, number], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
        )
        seen.append(done.stdout.splitlines()[2:])
    assert sorted(seen) == [["a::T[x;y]"], ["b's"]]
    for wrong in ([], ["3"]):
        done = subprocess.run(["sh", script, *wrong], capture_output=True, text=True)
        assert done.returncode == 2
        assert "there are 1 to 2" in done.stderr


def test_table_says_what_it_is_worth(run: object) -> None:
    out = run("--tier", "smoke", "--runners", 3).out  # type: ignore[operator]
    assert re.search(
        r"3 runners, predicted makespan [\d.]+ s; no split is below [\d.]+ s \(at most [\d.]+ % to gain\)", out
    )
    assert "times: 1 default, 6 measured, 5 modelled" in out
    assert f"proof: {len(SMOKE)} classes, each in exactly one of 3 shards" in out


# where seconds come from


def test_a_class_without_an_estimate_is_named_and_counts_as_the_median(run: object) -> None:
    done = run("--tier", "smoke", "--runners", 2, "--format", "json")  # type: ignore[operator]
    assert f"1 of {len(SMOKE)} classes have no estimate on {KIND} and count 15 s each: {SMOKE[-1]}" in done.err
    (last,) = [one for part in json.loads(done.out)["shards"] for one in part["classes"] if one["name"] == SMOKE[-1]]
    assert (last["seconds"], last["source"]) == (15.0, "default")
    done = run("--tier", "smoke", "--runners", 2, "--default-seconds", 99)  # type: ignore[operator]
    assert "count 99 s each" in done.err


def test_another_machine_has_no_estimates(run: object, est_time: Path) -> None:
    done = run("--tier", "smoke", "--runners", 2, "--machine", "nvidia-b200", "--est-time", est_time)  # type: ignore[operator]
    assert f"{len(SMOKE)} of {len(SMOKE)} classes have no estimate on nvidia-b200 and count 60 s each" in done.err


def test_a_list_may_leave_seconds_to_the_estimates(run: object, est_time: Path, tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(f"{NODEIDS[3]}\nother 7\n")
    done = run("--classes", path, "--runners", 1, "--est-time", est_time, "--machine", KIND, "--format", "json")  # type: ignore[operator]
    classes = json.loads(done.out)["shards"][0]["classes"]
    assert [(one["seconds"], one["source"]) for one in classes] == [(13.0, "modelled"), (7.0, "given")]


def test_a_list_is_read_from_standard_input(run: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", iter(["a 3\n", "b 2\n"]))
    assert run("--classes", "-", "--shard", "1/1").out.split() == ["a", "b"]  # type: ignore[operator]


def test_classes_and_ranks_choose(run: object) -> None:
    chosen = run("--tier", "smoke", "--class", SMOKE[0], "--class", SMOKE[5], "--shard", "1/1").out.split()  # type: ignore[operator]
    assert chosen == [NODEIDS[0], NODEIDS[5]]
    two = run("--tier", "smoke", "--ranks", 2, "--shard", "1/1").out.split()  # type: ignore[operator]
    assert two == [f"{CELLS_MODULE}::{cell.class_name}" for cell in cells(load_space(), "smoke") if cell.layout.tp == 2]


# deadlines and runners


def test_a_deadline_takes_as_few_runners_as_meet_it(run: object, times: Path) -> None:
    done = run("--classes", times, "--deadline", 35, "--format", "json")  # type: ignore[operator]
    split = json.loads(done.out)
    assert (split["runners"], split["runners_at_least"], split["makespan"]) == (2, 2, 35.0)
    with_start = json.loads(run("--classes", times, "--deadline", 35, "--overhead", 5, "--format", "json").out)  # type: ignore[operator]
    assert (with_start["runners"], with_start["makespan"]) == (3, 35.0)


def test_a_limit_that_one_class_exceeds(run: object, times: Path) -> None:
    done = run("--classes", times, "--deadline", 25, "--runners", 9)  # type: ignore[operator]
    assert (done.status, done.out) == (1, "")
    assert "tests/test_a.py::TestA alone takes 30 s" in done.err


def test_a_limit_that_there_are_too_few_runners_for(run: object, times: Path) -> None:
    done = run("--classes", times, "--deadline", 31, "--runners", 2)  # type: ignore[operator]
    assert (done.status, done.out) == (1, "")
    assert "on 2 runners: it needs 3 (at least 3)" in done.err


def test_a_limit_below_the_start(run: object, times: Path) -> None:
    done = run("--classes", times, "--deadline", 31, "--overhead", 31)  # type: ignore[operator]
    assert done.status == 1
    assert "a runner's start alone takes 31 s" in done.err


def test_more_runners_than_classes(run: object, times: Path) -> None:
    done = run("--classes", times, "--runners", 6, "--format", "nodeids")  # type: ignore[operator]
    assert done.status == 0
    assert "6 runners for 4 classes: 2 stay without one" in done.err
    assert len(done.out.splitlines()) == 4, "pytest without node ids would run everything"


def test_an_empty_shard_is_no_shard(run: object, times: Path) -> None:
    done = run("--classes", times, "--shard", "5/6")  # type: ignore[operator]
    assert (done.status, done.out) == (3, "")
    assert "shard 5 is empty" in done.err


# staying near


def test_previous_and_save(run: object, tmp_path: Path) -> None:
    kept = tmp_path / "split.json"
    first = run("--tier", "smoke", "--runners", 4, "--previous", kept, "--save", kept, "--format", "nodeids")  # type: ignore[operator]
    assert "there is no previous split" in first.err
    second = run("--tier", "smoke", "--runners", 4, "--previous", kept, "--save", kept, "--format", "nodeids")  # type: ignore[operator]
    assert second.out == first.out
    assert "; 0 classes moved" in second.err
    names = SMOKE[:-1]
    fewer = [argument for name in names for argument in ("--class", name)]
    third = run("--tier", "smoke", *fewer, "--runners", 4, "--previous", kept)  # type: ignore[operator]
    assert f"1 of its classes are not split any more: {SMOKE[-1]}" in third.err


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "shards": []}', '{"format": 1, "shards": [{}]}'])
def test_a_previous_split_that_is_none(run: object, times: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "split.json"
    path.write_text(text)
    done = run("--classes", times, "--runners", 2, "--previous", path)  # type: ignore[operator]
    assert (done.status, done.out) == (2, "")
    assert re.fullmatch(r"ci\.shard: .*split\.json: .*\n", done.err)


# sharing


def test_classes_that_share_stay_together(run: object, tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("a 10 model:x\nb 10 model:y\nc 10 model:x\nd 10 model:y\n")
    shards = nodeids_of(
        "nodeids", run("--classes", path, "--runners", 2, "--saving", "model=8", "--format", "nodeids").out
    )  # type: ignore[operator]
    assert sorted(shards) == [["a", "c"], ["b", "d"]]


def test_cells_of_a_model_share_its_checkpoint(run: object) -> None:
    """With a saving, fewer shards have to do with a model; and one saving for all groups of a kind is meant."""
    pairs = []
    for saving in ((), ("--saving", "checkpoint=9")):
        done = run("--tier", "smoke", "--runners", 4, *saving, "--format", "nodeids")  # type: ignore[operator]
        shards = nodeids_of("nodeids", done.out)
        pairs.append(sum(len({nodeid.split("::")[1].split("_")[0] for nodeid in part}) for part in shards))
    assert pairs[1] < pairs[0]
    assert pairs[1] <= 5


def test_a_saving_is_cut_to_what_its_classes_take(run: object, tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("a 10 model:x\nb 2 model:x\n")
    done = run("--classes", path, "--runners", 1, "--saving", "model=8", "--format", "json")  # type: ignore[operator]
    assert "b takes 2 s: what model:x save is cut to half of that" in done.err
    assert json.loads(done.out)["makespan"] == 11.0


def test_a_saving_names_a_group_or_a_kind() -> None:
    classes = [
        ClassTime("a", "a", 10, 60, "given", ("model:x", "daemon:x")),
        ClassTime("b", "b", 10, 60, "given", ("model:y",)),
    ]
    assert group_savings(classes, {"model": 2.0, "model:y": 3.0}) == (
        {"daemon:x": 0.0, "model:x": 2.0, "model:y": 3.0},
        [],
    )


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
def test_lists_that_are_none(run: object, times: Path, lines: str, text: str) -> None:
    times.write_text(lines)
    done = run("--classes", times, "--runners", 2)  # type: ignore[operator]
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
def test_bad_input_is_one_line(run: object, times: Path, arguments: Iterable[object], text: str) -> None:
    done = run(*(times if one == "LIST" else one for one in arguments))  # type: ignore[operator]
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
def test_arguments_that_make_no_sense(run: object, arguments: tuple[object, ...]) -> None:
    done = run(*arguments)  # type: ignore[operator]
    assert (done.status, done.out) == (2, "")
    assert "error: " in done.err


def test_help_has_examples_that_work(run: object) -> None:
    text = run("--help").out  # type: ignore[operator]
    assert "exit status:" in text
    examples = re.findall(r"^  python -m ci\.shard (--tier .*?)(?:  .*)?$", text, re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        assert run(*shlex.split(example), "--default-seconds", 60).status == 0, example  # type: ignore[operator]


# the proof


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ([["a"], ["b"]], "c in no shard"),
        ([["a", "b"], ["b", "c"]], "b in more than one place"),
        ([["a", "b"], ["c", "d"]], "d not among what was to be split"),
        ([["a", "a"], ["b", "c"]], "a in more than one place"),
    ],
)
def test_what_is_no_partition_is_refused(shards: list[list[str]], text: str) -> None:
    with pytest.raises(NotAPartitionError, match=text):
        check_partition(shards, ["a", "b", "c"])


def test_a_partition_is_one() -> None:
    check_partition([["b"], ["c", "a"], []], ["a", "b", "c"])


def test_each_split_is_checked(run: object, times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packing that forgets a class is seen before anything is printed."""
    forgetful = Packing(((Job("c", 10),), (Job("d", 5),)), (10.0, 5.0), 10.0)
    monkeypatch.setattr(shard, "pack", lambda *_: forgetful)
    done = run("--classes", times, "--runners", 2, "--format", "nodeids")  # type: ignore[operator]
    assert (done.status, done.out) == (2, "")
    assert "tests/test_a.py::TestA, tests/test_b.py::TestB in no shard" in done.err


def test_a_job_is_stopped_later_than_a_class_that_hangs() -> None:
    """60 s of start, 1.5 times 30 s, and 280 s more for the class whose time-out is 300 s: 385 s, 7 minutes."""
    classes = [ClassTime("a", "a", 20, 300, "given"), ClassTime("b", "b", 10, 60, "given")]
    packing = Packing((tuple(one.job for one in classes),), (30.0,), 30.0)
    (one,) = shards_of(packing, classes, 60.0)
    assert (one.seconds, one.timeout_minutes) == (90.0, 7)


def test_one_runner_of_a_plan_is_named_by_its_number() -> None:
    one = ClassTime("a", "a", 20, 300, "given")
    plan = Plan("cpu", ("cpu",), (Shard(1, 1, (one,), 20.0, 3),), 20.0)
    assert json.loads(github(plan))["include"][0]["shard"] == "1-of-1"
    assert shard_plan.Shard(2, 4, (one,), 20.0, 3).name == "2/4"
