"""The nightly calibration job: its structure, and each of its steps executed in a copy of the project."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ci.est_time_file import read_est_times
from conformance.selftest.ci_samples import KIND, write_ledger
from matrix.generate import cells
from matrix.space import load_space

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
CLASSES = [cell.class_name for cell in cells(load_space())][:3]
#: Answers as the service's command does: three runs, of which the last has no artifact; the rest is written down.
GH = """#!/bin/sh
echo "$@" >> "$STAND_IN/calls"
case "$1 $2" in
  "run list") printf '101\\n102\\n103\\n';;
  "run download")
    test -d "$STAND_IN/artifacts/$3" || { echo "no artifact matches any of the names or patterns provided" >&2; exit 1; }
    mkdir -p "$7" && cp -r "$STAND_IN/artifacts/$3/." "$7";;
  "pr list") cat "$STAND_IN/open";;
  "pr create" | "pr edit") echo https://example.invalid/1;;
  *) echo "unknown: $*" >&2; exit 2;;
esac
"""


def workflow() -> dict[Any, Any]:
    found = yaml.safe_load((WORKFLOWS / "calibrate.yml").read_text())
    assert isinstance(found, dict)
    return found


def steps() -> list[dict[str, Any]]:
    (job,) = workflow()["jobs"].values()
    return list(job["steps"])


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


class Service:
    """A clone of a copy of the project, and what stands in for the service."""

    def __init__(self, path: Path) -> None:
        self.path, self.clone, self.stand_in = path, path / "clone", path / "stand-in"
        source = path / "source"
        for name in ("ci", "matrix"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "est_time.json"))
        (source / "reports" / "ledger").mkdir(parents=True)
        write_ledger(source / "reports" / "ledger" / "committed.jsonl", [dict.fromkeys(CLASSES, 40.0)] * 2)
        git(path, "init", "-q", "source")
        git(source, "add", ".")
        git(source, "commit", "-qm", "first", "--no-verify")
        git(path, "clone", "-q", "--bare", "source", "remote.git")
        git(path, "clone", "-q", "remote.git", "clone")
        bin_directory = self.stand_in / "bin"
        bin_directory.mkdir(parents=True)
        (bin_directory / "gh").write_text(GH)
        (bin_directory / "gh").chmod(0o755 | stat.S_IXUSR)
        (self.stand_in / "open").write_text("0\n")

    def artifact(self, run: int, *runs: float, day: int) -> None:
        directory = self.stand_in / "artifacts" / str(run) / "ledger-3.12"
        directory.mkdir(parents=True, exist_ok=True)
        write_ledger(directory / "local.jsonl", [dict.fromkeys(CLASSES, one) for one in runs], day=day)

    def execute(self, step: dict[str, Any], as_of: str = "2026-11-01") -> subprocess.CompletedProcess[str]:
        """Run a step as the service does: its own shell, which ends at the first command that fails."""
        search = [str(self.stand_in / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        (job,) = workflow()["jobs"].values()
        plain = {name: value for name, value in job["env"].items() if "${{" not in value}
        # Without an index, the installing step passes only if what it names is enough and is here.
        environment = (
            os.environ
            | plain
            | {
                "PATH": ":".join(search),
                "AS_OF": as_of,
                "STAND_IN": str(self.stand_in),
                "PIP_NO_INDEX": "1",
                "GH_TOKEN": "none",
                "PYTHONPATH": "",
            }
        )
        return subprocess.run(
            ["bash", "-e", "-c", step["run"]],
            cwd=self.clone,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def night(self, as_of: str = "2026-11-01") -> None:
        """One night: a fresh clone, all steps in order."""
        shutil.rmtree(self.clone)
        git(self.path, "clone", "-q", "remote.git", "clone")
        (self.stand_in / "calls").unlink(missing_ok=True)
        for step in steps():
            if "run" in step and "pip install" not in step["run"]:
                done = self.execute(step, as_of)
                assert done.returncode == 0, f"{step['name']}: {done.stdout}{done.stderr}"

    @property
    def calls(self) -> list[str]:
        return (self.stand_in / "calls").read_text().splitlines()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_structure() -> None:
    content = workflow()
    triggers = content[True]  # YAML 1.1 reads the key `on` as a truth value
    assert [len(one["cron"].split()) for one in triggers["schedule"]] == [5], "it runs by itself, each night"
    assert "workflow_dispatch" in triggers
    assert content["permissions"] == {"actions": "read", "contents": "write", "pull-requests": "write"}
    (job,) = content["jobs"].values()
    assert set(job) == {"runs-on", "timeout-minutes", "env", "steps"}
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert set(step) <= {"name", "uses", "with", "run"}
        if "run" in step:
            assert step["name"]
            assert "${{" not in step["run"], "an expression can't be executed here, and may carry code of others"
        else:
            assert "@v" in step["uses"]


def test_it_reads_the_artifacts_that_the_conformance_job_leaves() -> None:
    (gathering,) = [step["run"] for step in steps() if step.get("name") == "Gather ledgers"]
    assert "--workflow conformance.yml" in gathering
    assert "--pattern 'ledger-*'" in gathering
    jobs = yaml.safe_load((WORKFLOWS / "conformance.yml").read_text())["jobs"]
    uploads = [
        step["with"]["name"]
        for job in jobs.values()
        for step in job["steps"]
        if "upload-artifact" in step.get("uses", "")
    ]
    assert any(name.startswith("ledger-") for name in uploads)


def test_what_it_installs_is_enough(service: Service) -> None:
    (installing,) = [step for step in steps() if "pip install" in step.get("run", "")]
    done = service.execute(installing)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {word.strip("'").split(">=")[0] for word in installing["run"].split() if ">=" in word}
    probe = (
        "import sys, ci.calibrate, importlib.metadata as m; packages = m.packages_distributions();"
        "print(*{name for module in list(sys.modules) for name in packages.get(module.split('.')[0], ())})"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    needed = {"numpy", "msgspec", "filelock", "rich", "tabulate"}
    assert names == needed
    heavy = {"torch", "transformers", "safetensors", "pytest", "starlette", "requests", "jinja2", "psutil"}
    assert not heavy & set(done.stdout.lower().split()), "needed, and not installed"


def test_a_night_with_new_readings_opens_a_change(service: Service) -> None:
    service.artifact(101, 41.0, 42.0, day=5)
    service.artifact(102, 43.0, day=9)
    service.night()
    assert [call.split()[:3] for call in service.calls if call.startswith("run download")] == [
        ["run", "download", run] for run in ("101", "102", "103")
    ]
    assert (
        service.calls[-1]
        == "pr create --head calibrate/est-time --title Calibrate est_time --body-file reports/est_time.md"
    )
    remote = service.path / "remote.git"
    assert git(remote, "diff", "--name-only", "main", "calibrate/est-time").split() == [
        "ci/est_time.json",
        "reports/est_time.md",
    ]
    found = read_est_times(service.clone / "ci" / "est_time.json")[KIND]
    assert {name: (one.readings, one.est_time) for name, one in found.items()} == dict.fromkeys(CLASSES, (5, 42.0))
    assert f"| {CLASSES[0]} " in git(remote, "show", "calibrate/est-time:reports/est_time.md")


def test_the_next_night_renews_the_open_change(service: Service) -> None:
    service.artifact(101, 41.0, 42.0, day=5)
    service.night()
    (service.stand_in / "open").write_text("1\n")
    service.artifact(101, 43.0, day=9)
    service.night()
    assert service.calls[-1] == "pr edit calibrate/est-time --body-file reports/est_time.md"
    assert git(service.path / "remote.git", "rev-list", "--count", "main..calibrate/est-time") == "1"


def test_a_night_without_news_changes_nothing(service: Service) -> None:
    service.artifact(101, 41.0, 42.0, day=5)
    service.night()
    remote = service.path / "remote.git"
    git(remote, "update-ref", "refs/heads/main", "calibrate/est-time")
    before = git(remote, "show-ref")
    service.artifact(102, 41.5, day=9)
    service.night()
    assert git(remote, "show-ref") == before
    assert not any(call.startswith("pr ") for call in service.calls)


@pytest.mark.parametrize("damage", ["newer", "none"])
def test_a_night_that_can_not_be_read_fails_and_opens_nothing(service: Service, damage: str) -> None:
    (service.clone / "reports" / "ledger" / "committed.jsonl").unlink()
    if damage == "newer":
        service.artifact(101, 41.0, 42.0, 43.0, day=5)
        (ledger,) = (service.stand_in / "artifacts").rglob("*.jsonl")
        ledger.write_text(ledger.read_text() + '{"type":"record","format":9}\n')
    gathering, calibrating, _ = [step for step in steps() if "run" in step][1:]
    assert service.execute(gathering).returncode == 0
    done = service.execute(calibrating)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert git(service.clone, "status", "--porcelain", "ci") == ""
