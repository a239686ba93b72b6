"""The workflow that runs the suite on each change: its structure, and what its `run:` steps do when they are executed."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from conformance.scheduler import unit_of
from conformance.selftest.workflow_check import EXPRESSION, complaints
from matrix.generate import cells
from matrix.space import load_space

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CONFORMANCE = ROOT / ".github/workflows/conformance.yml"
#: What `ci.shard --format github` gives each job; `test_ci_shard` holds it to that.
MATRIX_KEYS = {"name", "shard", "runner", "nodeids", "seconds", "timeout-minutes"}
KEYS = {"quick": MATRIX_KEYS, "gpu": MATRIX_KEYS, "test": {"python"}}
Workflow = dict[Any, Any]


def load(path: Path) -> Workflow:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(workflow, dict)
    return workflow


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_structure(path: Path) -> None:
    assert complaints(load(path), KEYS) == []


def steps(workflow: Workflow, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workflow["jobs"][job]["steps"]
    return found


BROKEN: dict[str, Callable[[Workflow], object]] = {
    "unknown key 'job'": lambda w: w.update(job={}),
    "jobs is missing": lambda w: w.pop("jobs"),
    "on is missing": lambda w: w.pop(True),
    "unknown trigger 'pushed'": lambda w: w[True].update(pushed=None),
    "job gpu: runs-on is missing": lambda w: w["jobs"]["gpu"].pop("runs-on"),
    "job gpu: timeout-minutes is missing": lambda w: w["jobs"]["gpu"].pop("timeout-minutes"),
    "job gpu: unknown key 'step'": lambda w: w["jobs"]["gpu"].update(step=[]),
    "job quick: needs splits, which there isn't": lambda w: w["jobs"]["quick"].update(needs="splits"),
    "job quick: needs.split.outputs.quick: the job doesn't need split": lambda w: w["jobs"]["quick"].pop("needs"),
    "job split needs itself": lambda w: w["jobs"]["split"].update(needs="conformance"),
    "job quick: needs.split.outputs.quick: no such output": lambda w: w["jobs"]["split"]["outputs"].pop("quick"),
    "job split: steps.quick.outputs.matrix: no step before has that id": lambda w: steps(w, "split")[4].pop("id"),
    "job split: step 6: id quick is taken": lambda w: steps(w, "split")[5].update(id="quick"),
    "job split: step 3: one of `uses` and `run`": lambda w: steps(w, "split")[2].update(uses="actions/checkout@v4"),
    "job split: step 1: uses 'actions/checkout': not OWNER/NAME@VERSION": lambda w: steps(w, "split")[0].update(
        uses="actions/checkout"
    ),
    "job split: step 3: `with` without `uses`": lambda w: steps(w, "split")[2].update({"with": {"path": "a"}}),
    "job quick: matrix.node: the matrix has no such key": lambda w: w["jobs"]["quick"]["env"].update(
        NODEIDS="${{ matrix.node }}"
    ),
    "job quick: unknown name gihub.ref": lambda w: w["jobs"]["quick"].update({"if": "gihub.ref != ''"}),
    "job gpu: unknown function contain": lambda w: w["jobs"]["gpu"].update({"if": "contain('a', 'b')"}),
    "job gpu: '${{ matrix.name': an expression isn't closed": lambda w: w["jobs"]["gpu"].update(name="${{ matrix.name"),
    "job gpu: step 2: an expression in `run` can't be executed elsewhere": lambda w: steps(w, "gpu")[1].update(
        run="echo ${{ github.ref }}"
    ),
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_the_check_sees(complaint: str) -> None:
    workflow = copy.deepcopy(load(CONFORMANCE))
    BROKEN[complaint](workflow)
    assert [text for text in complaints(workflow, KEYS) if text.startswith(complaint)]


def test_a_change_of_a_fork_runs_on_no_machine_of_ours() -> None:
    workflow = load(CONFORMANCE)
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow[True]
    condition = " ".join(workflow["jobs"]["gpu"]["if"].split())
    assert "github.event.pull_request.head.repo.full_name == github.repository" in condition


def test_one_job_waits_for_all() -> None:
    jobs = load(CONFORMANCE)["jobs"]
    assert set(jobs["conformance"]["needs"]) == jobs.keys() - {"conformance"}
    assert jobs["conformance"]["if"] == "always()"


@pytest.mark.parametrize(("job", "module"), [("split", "ci.shard"), ("conformance", "matrix.cli")])
def test_what_is_installed_is_enough(job: str, module: str) -> None:
    """The module is imported where nothing of site-packages can be, but for what the job installs."""
    (install,) = [step["run"] for step in steps(load(CONFORMANCE), job) if "pip install" in step.get("run", "")]
    allowed = {re.split(r"[<>=]", name)[0] for name in re.findall(r"'([^']+)'", install)}
    program = f"""
import importlib, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(INSTALLED - allowed)}:
            raise ModuleNotFoundError(f"{{name}} is not installed in this job")
sys.meta_path.insert(0, Hidden())
importlib.import_module({module!r})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


#: Third-party packages that the rooms `ci` and `matrix` might import.
INSTALLED = {"msgspec", "filelock", "tabulate", "numpy", "rich", "jinja2", "torch", "yaml", "safetensors", "psutil"}


class Service:
    """Executes the workflow's `run:` steps in a copy of the tree, with what the service would put around them.

    `python` is replaced by one that installs nothing, and that collects tests without running them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "tree"
        self.directory.mkdir()
        for name in ("ci", "conformance", "matrix", "reference", "pyproject.toml"):
            (self.directory / name).symlink_to(ROOT / name)
        self.binaries = directory / "bin"
        self.binaries.mkdir()
        python = self.binaries / "python"
        python.write_text(
            "#!/bin/sh\n"
            f'if [ "$1 $2" = "-m pip" ] || [ "$1 $2" = "-m venv" ]; then echo "not done: $*"; exit 0; fi\n'
            f'if [ "$1 $2" = "-m pytest" ]; then shift 2; set -- -m pytest --collect-only -q "$@"; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        (self.binaries / "python3").symlink_to(python)
        (self.directory / ".venv/bin").mkdir(parents=True)
        (self.directory / ".venv/bin/python").symlink_to(python)
        self.workflow = load(CONFORMANCE)

    def run(self, job: str, step: Mapping[str, Any], context: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
        """Execute one step; its environment is the job's and its own, expressions replaced."""
        environment = {**self.workflow["jobs"][job].get("env", {}), **step.get("env", {})}
        given = {name: self._value(str(value), context) for name, value in environment.items()}
        files = {name: str(self.directory / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        path = f"{self.binaries}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-e", "-c", step["run"]],
            cwd=self.directory,
            env=os.environ | files | {"PATH": path} | given,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def job(self, name: str, context: Mapping[str, Any]) -> list[subprocess.CompletedProcess[str]]:
        """Execute a job's `run:` steps, in order; each has to end well."""
        done = []
        for step in steps(self.workflow, name):
            if "run" in step:
                done.append(self.run(name, step, context))
                assert done[-1].returncode == 0, f"{step['name']}: {done[-1].stdout}{done[-1].stderr}"
        return done

    def _value(self, text: str, context: Mapping[str, Any]) -> str:
        return EXPRESSION.sub(lambda found: str(context[found[1].strip()]), text)

    def outputs(self) -> list[dict[str, Any]]:
        """The matrices that the first job has written, in its steps' order."""
        lines = (self.directory / "github_output").read_text().splitlines()
        assert all(line.startswith("matrix=") for line in lines)
        return [json.loads(line.removeprefix("matrix=")) for line in lines]


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


GPU = {"vars.GPU_RUNNERS": "3", "vars.GPU_MACHINE": "nvidia-h200"}


def tier(name: str) -> set[str]:
    return {f"conformance/test_cells.py::{cell.class_name}" for cell in cells(load_space(), name)}


def test_split_gives_matrices_that_hold_each_class_once(service: Service) -> None:
    service.job("split", GPU)
    quick, gpu = service.outputs()
    for matrix, wanted in ((quick, tier("smoke")), (gpu, tier("full"))):
        assert set(matrix) == {"include"}
        nodeids = [nodeid for job in matrix["include"] for nodeid in job["nodeids"].split()]
        assert len(nodeids) == len(set(nodeids))
        assert set(nodeids) == wanted
        assert all(job.keys() == MATRIX_KEYS for job in matrix["include"])
    assert len(gpu["include"]) == 3
    assert gpu["include"][0]["runner"] == ["self-hosted", "nvidia-h200", "2gpu"]
    assert sorted(path.name for path in (service.directory / "splits").iterdir()) == ["gpu.json", "quick.json"]


def test_a_second_run_moves_nothing(service: Service) -> None:
    service.job("split", GPU)
    done = service.job("split", GPU)
    assert service.outputs()[:2] == service.outputs()[2:]
    assert sum("; 0 classes moved" in one.stderr for one in done) == 2


def test_a_split_that_fails_fails_its_step(service: Service) -> None:
    step = steps(service.workflow, "split")[5]
    done = service.run("split", step, GPU | {"vars.GPU_RUNNERS": "none"})
    assert done.returncode != 0
    assert "--runners" in done.stderr


@pytest.mark.parametrize("job", ["quick", "gpu"])
def test_shards_collect_what_they_were_given(service: Service, job: str) -> None:
    service.job("split", GPU)
    matrix = service.outputs()[0 if job == "quick" else 1]["include"]
    if job == "gpu":
        service.workflow["jobs"]["gpu"]["env"]["DEVICE"] = "cpu"
    collected: list[str] = []
    for shard in matrix:
        *_, pytest_run = service.job(job, {f"matrix.{key}": value for key, value in shard.items()})
        units = {unit_of(line) for line in pytest_run.stdout.splitlines() if "::test_" in line}
        assert {unit.rpartition("::")[2] for unit in units} == {
            nodeid.rpartition("::")[2] for nodeid in shard["nodeids"].split()
        }
        collected += units
    assert len(collected) == len(set(collected)) == len(tier("smoke" if job == "quick" else "full"))


def test_the_last_job_shows_the_table(service: Service) -> None:
    (service.directory / "ledgers").mkdir()
    (service.directory / "ledgers/quick-1-of-1.jsonl").write_text("")
    service.job("conformance", {"join(needs.*.result, ' ')": "success success skipped"})
    assert f"{len(tier('full'))} cells: 0 passed" in (service.directory / "github_step_summary").read_text()


@pytest.mark.parametrize("results", ["failure skipped skipped", "success cancelled skipped", "success success failure"])
def test_the_last_job_fails_with_any(service: Service, results: str) -> None:
    done = service.run(
        "conformance", steps(service.workflow, "conformance")[-1], {"join(needs.*.result, ' ')": results}
    )
    assert done.returncode == 1
    assert done.stderr.startswith("a job is: ")
