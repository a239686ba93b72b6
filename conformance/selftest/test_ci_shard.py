"""`python -m ci.shard`: what it emits is a partition of what there is, in each format."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ci import shard
from ci.class_times import CELLS_MODULE, ClassTime, group_savings
from ci.packing import Job, Packing
from ci.shard_formats import FORMATS, github
from ci.shard_plan import NotAPartitionError, Plan, Shard, check_partition, shards_of
from conformance.scheduler import unit_of
from conformance.selftest.shard_command import KIND, NODEIDS, SMOKE, Run, nodeids_of
from conformance.selftest.test_ci_workflow import MATRIX_KEYS
from matrix.generate import cells
from matrix.space import load_space

pytest_plugins = ["conformance.selftest.shard_command"]

ROOT = Path(__file__).parents[2]


# what is emitted


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "table"])
@pytest.mark.parametrize("runners", [1, 3, 5, 12])
def test_each_format_holds_each_class_once(run: Run, form: str, runners: int) -> None:
    done = run("--tier", "smoke", "--runners", runners, "--format", form)
    assert done.status == 0
    shards = nodeids_of(form, done.out)
    assert len(shards) == runners
    assert all(shards)
    assert sorted(itertools.chain(*shards)) == sorted(NODEIDS)
    assert "predicted makespan" in done.err


def test_shards_are_what_the_whole_split_says(run: Run) -> None:
    whole = nodeids_of("nodeids", run("--tier", "smoke", "--runners", 5, "--format", "nodeids").out)
    parts = [run("--tier", "smoke", "--shard", f"{number}/5").out.split() for number in range(1, 6)]
    assert parts == whole


@pytest.mark.parametrize("tier", ["smoke", "full"])
def test_shards_are_what_pytest_collects(run: Run, tier: str) -> None:
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

    shards = nodeids_of("nodeids", run("--tier", tier, "--runners", 4, "--format", "nodeids").out)
    check_partition(shards, collect("conformance/test_cells.py"))
    assert collect(*shards[0]) == sorted(shards[0])


def test_github_matrix(run: Run) -> None:
    done = run("--tier", "smoke", "--runners", 3, "--format", "github", "--label", "self-hosted", "--label", "gpu")
    assert done.out.count("\n") == 1, "GITHUB_OUTPUT takes one line"
    include = json.loads(done.out)["include"]
    assert all(one.keys() == MATRIX_KEYS for one in include)
    assert [one["name"] for one in include] == [f"{KIND} {number}/3" for number in (1, 2, 3)]
    assert all(one["runner"] == ["self-hosted", "gpu"] for one in include)
    assert all(one["timeout-minutes"] * 60 > one["seconds"] for one in include)
    one_label = json.loads(run("--tier", "smoke", "--runners", 3, "--format", "github", "--label", "a").out)
    assert one_label["include"][0]["runner"] == "a"


def test_github_takes_no_more_than_256_jobs(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("".join(f"class{number} 1\n" for number in range(257)))
    done = run("--classes", path, "--runners", 257, "--format", "github")
    assert (done.status, done.out) == (2, "")
    assert "at most 256" in done.err


def test_buildkite_steps(run: Run) -> None:
    steps = json.loads(
        run(
            "--tier", "smoke", "--runners", 2, "--format", "buildkite", "--label", "h200", "--pytest-args", "-k '$x'"
        ).out
    )["steps"]
    assert [step["key"] for step in steps] == [f"conformance-{KIND}-1", f"conformance-{KIND}-2"]
    assert all(step["agents"] == {"queue": "h200"} for step in steps)
    assert all(step["command"].endswith(" --tier smoke -k '$$x'") for step in steps), "the agent expands a single $"
    assert all(step["timeout_in_minutes"] >= 1 for step in steps)


def test_shell_script_runs_the_shard_it_is_given(run: Run, tmp_path: Path) -> None:
    times = tmp_path / "times"
    times.write_text("a::T[x;y] 2\nb's 1\n")
    script = tmp_path / "run.sh"
    script.write_text(run("--classes", times, "--runners", 2, "--format", "shell").out)
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


def test_table_says_what_it_is_worth(run: Run) -> None:
    out = run("--tier", "smoke", "--runners", 3).out
    assert re.search(
        r"3 runners, predicted makespan [\d.]+ s; no split is below [\d.]+ s \(at most [\d.]+ % to gain\)", out
    )
    assert "times: 1 default, 6 measured, 5 modelled" in out
    assert f"proof: {len(SMOKE)} classes, each in exactly one of 3 shards" in out


# where seconds come from


def test_a_class_without_an_estimate_is_named_and_counts_as_the_median(run: Run) -> None:
    done = run("--tier", "smoke", "--runners", 2, "--format", "json")
    assert f"1 of {len(SMOKE)} classes have no estimate on {KIND} and count 15 s each: {SMOKE[-1]}" in done.err
    (last,) = [one for part in json.loads(done.out)["shards"] for one in part["classes"] if one["name"] == SMOKE[-1]]
    assert (last["seconds"], last["source"]) == (15.0, "default")
    done = run("--tier", "smoke", "--runners", 2, "--default-seconds", 99)
    assert "count 99 s each" in done.err


def test_another_machine_has_no_estimates(run: Run, est_time: Path) -> None:
    done = run("--tier", "smoke", "--runners", 2, "--machine", "nvidia-b200", "--est-time", est_time)
    assert f"{len(SMOKE)} of {len(SMOKE)} classes have no estimate on nvidia-b200 and count 60 s each" in done.err


def test_a_list_may_leave_seconds_to_the_estimates(run: Run, est_time: Path, tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(f"{NODEIDS[3]}\nother 7\n")
    done = run("--classes", path, "--runners", 1, "--est-time", est_time, "--machine", KIND, "--format", "json")
    classes = json.loads(done.out)["shards"][0]["classes"]
    assert [(one["seconds"], one["source"]) for one in classes] == [(13.0, "modelled"), (7.0, "given")]


def test_a_list_is_read_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", iter(["a 3\n", "b 2\n"]))
    assert run("--classes", "-", "--shard", "1/1").out.split() == ["a", "b"]


def test_classes_and_ranks_choose(run: Run) -> None:
    chosen = run("--tier", "smoke", "--class", SMOKE[0], "--class", SMOKE[5], "--shard", "1/1").out.split()
    assert chosen == [NODEIDS[0], NODEIDS[5]]
    two = run("--tier", "smoke", "--ranks", 2, "--shard", "1/1").out.split()
    assert two == [f"{CELLS_MODULE}::{cell.class_name}" for cell in cells(load_space(), "smoke") if cell.layout.tp == 2]


# sharing


def test_classes_that_share_stay_together(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("a 10 model:x\nb 10 model:y\nc 10 model:x\nd 10 model:y\n")
    shards = nodeids_of(
        "nodeids", run("--classes", path, "--runners", 2, "--saving", "model=8", "--format", "nodeids").out
    )
    assert sorted(shards) == [["a", "c"], ["b", "d"]]


def test_cells_of_a_model_share_its_checkpoint(run: Run) -> None:
    """With a saving, fewer shards have to do with a model; and one saving for all groups of a kind is meant."""
    pairs = []
    for saving in ((), ("--saving", "checkpoint=9")):
        done = run("--tier", "smoke", "--runners", 4, *saving, "--format", "nodeids")
        shards = nodeids_of("nodeids", done.out)
        pairs.append(sum(len({nodeid.split("::")[1].split("_")[0] for nodeid in part}) for part in shards))
    assert pairs[1] < pairs[0]
    assert pairs[1] <= 5


def test_a_saving_is_cut_to_what_its_classes_take(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("a 10 model:x\nb 2 model:x\n")
    done = run("--classes", path, "--runners", 1, "--saving", "model=8", "--format", "json")
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


def test_each_split_is_checked(run: Run, times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packing that forgets a class is seen before anything is printed."""
    forgetful = Packing(((Job("c", 10),), (Job("d", 5),)), (10.0, 5.0), 10.0)
    monkeypatch.setattr(shard, "pack", lambda *_: forgetful)
    done = run("--classes", times, "--runners", 2, "--format", "nodeids")
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
    assert Shard(2, 4, (one,), 20.0, 3).name == "2/4"
