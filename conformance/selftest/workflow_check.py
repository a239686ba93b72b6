"""What GitHub Actions demands of a workflow, as far as it can be told from the file: a list of what is wrong with one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

TOP = {"name", "run-name", "on", "permissions", "env", "defaults", "concurrency", "jobs"}
JOB = {"name", "needs", "if", "runs-on", "permissions", "environment", "concurrency", "outputs", "env", "defaults"} | {
    "steps",
    "timeout-minutes",
    "strategy",
    "continue-on-error",
    "container",
    "services",
}
STEP = {"id", "if", "name", "uses", "run", "working-directory", "shell", "with", "env", "continue-on-error"} | {
    "timeout-minutes"
}
TRIGGERS = {"push", "pull_request", "schedule", "workflow_dispatch", "workflow_call", "merge_group"}
CONTEXTS = {"github", "env", "vars", "job", "steps", "runner", "secrets", "strategy", "matrix", "needs", "inputs"}
FUNCTIONS = {"always", "success", "failure", "cancelled", "contains", "startsWith", "endsWith", "format", "join"} | {
    "fromJSON",
    "toJSON",
    "hashFiles",
}
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_NAME = re.compile(r"(?<![\w.'*-])([A-Za-z_][\w-]*)((?:\.(?:[\w-]+|\*))*)(\()?")
_ID = re.compile(r"[A-Za-z_][\w-]*")


def complaints(workflow: Mapping[Any, Any], matrix_keys: Mapping[str, set[str]]) -> list[str]:
    """Return what is wrong with a workflow that YAML has been read to. `matrix_keys`: what each job's matrix holds."""
    top = {("on" if key is True else key): value for key, value in workflow.items()}  # YAML 1.1: `on` is a truth value
    found = [f"unknown key {key!r}" for key in top.keys() - TOP]
    found += [f"{key} is missing" for key in ("on", "jobs") if not top.get(key)]
    found += [f"unknown trigger {name!r}" for name in set(top.get("on") or ()) - TRIGGERS]
    jobs = top.get("jobs") or {}
    for name, job in jobs.items():
        found += [f"job {name}: {text}" for text in _of_job(job, jobs, matrix_keys.get(name, set()))]
        if not _ID.fullmatch(name):
            found.append(f"job {name}: no identifier")
    return found + [f"job {name} needs itself" for name in jobs if name in _needed(name, jobs)]


def _needed(name: str, jobs: Mapping[str, Any]) -> set[str]:
    """Return every job that a job waits for."""
    found: set[str] = set()
    waiting = _needs(jobs[name])
    while waiting:
        one = waiting.pop()
        if one not in found and one in jobs:
            found.add(one)
            waiting += _needs(jobs[one])
    return found


def _needs(job: Mapping[str, Any]) -> list[str]:
    needs = job.get("needs", [])
    return [needs] if isinstance(needs, str) else list(needs)


def _of_job(job: Mapping[str, Any], jobs: Mapping[str, Any], matrix_keys: set[str]) -> Iterator[str]:
    yield from (f"unknown key {key!r}" for key in job.keys() - JOB)
    yield from (f"{key} is missing" for key in ("runs-on", "steps", "timeout-minutes") if not job.get(key))
    yield from (f"needs {name}, which there isn't" for name in _needs(job) if name not in jobs)
    steps = job.get("steps") or []
    before: set[str] = set()
    for number, step in enumerate(steps, 1):
        yield from (f"step {number}: {text}" for text in _of_step(step))
        here = _Scope(jobs, _needs(job), before, matrix_keys, in_step=True)
        yield from (f"step {number}: {text}" for text in here.check(step, {"if"}))
        if "id" in step:
            if step["id"] in before:
                yield f"step {number}: id {step['id']} is taken"
            before.add(step["id"])
    whole = _Scope(jobs, _needs(job), before, matrix_keys, in_step=False)
    yield from whole.check({key: value for key, value in job.items() if key != "steps"}, {"if"})


def _of_step(step: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"unknown key {key!r}" for key in step.keys() - STEP)
    if ("uses" in step) == ("run" in step):
        yield "one of `uses` and `run`"
    if "uses" in step and not re.fullmatch(r"[\w.-]+/[\w./-]+@[\w.]+", step["uses"]):
        yield f"uses {step['uses']!r}: not OWNER/NAME@VERSION"
    if "with" in step and "uses" not in step:
        yield "`with` without `uses`"
    if "${{" in str(step.get("run", "")):
        yield "an expression in `run` can't be executed elsewhere, and may carry code of others: hand it over by `env`"


class _Scope:
    """What an expression at some place may speak of."""

    def __init__(
        self, jobs: Mapping[str, Any], needs: list[str], steps: set[str], matrix_keys: set[str], *, in_step: bool
    ) -> None:
        self.jobs, self.needs, self.steps, self.matrix_keys, self.in_step = (
            jobs,
            needs,
            set(steps),
            matrix_keys,
            in_step,
        )

    def check(self, value: Any, bare: set[str]) -> Iterator[str]:
        """Yield what is wrong with the expressions of a value, at any depth; keys in `bare` are expressions by themselves."""
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key in bare and isinstance(inner, str) and "${{" not in inner:
                    yield from self._names(inner)
                else:
                    yield from self.check(inner, bare)
        elif isinstance(value, list):
            for inner in value:
                yield from self.check(inner, bare)
        elif isinstance(value, str):
            if value.count("${{") != len(EXPRESSION.findall(value)):
                yield f"{value!r}: an expression isn't closed"
            for expression in EXPRESSION.findall(value):
                yield from self._names(expression)

    def _names(self, expression: str) -> Iterator[str]:
        text = re.sub(r"'[^']*'", "''", expression)
        for name, path, call in _NAME.findall(text):
            if call:
                if name not in FUNCTIONS:
                    yield f"unknown function {name}"
            elif name not in CONTEXTS:
                if name not in ("true", "false", "null"):
                    yield f"unknown name {name}{path}"
            else:
                yield from self._path(name, path.split(".")[1:])

    def _path(self, context: str, path: list[str]) -> Iterator[str]:
        said = ".".join([context, *path])
        if context == "needs" and path and path[0] != "*":
            if path[0] not in self.needs:
                yield f"{said}: the job doesn't need {path[0]}"
            elif path[1:2] == ["outputs"] and path[2] not in (self.jobs.get(path[0], {}).get("outputs") or {}):
                yield f"{said}: no such output"
        elif context == "steps" and path and path[0] not in self.steps:
            yield f"{said}: no step before has that id"
        elif context == "matrix" and path and path[0] not in self.matrix_keys:
            yield f"{said}: the matrix has no such key"
        elif context == "runner" and not self.in_step:
            yield f"{said}: not known outside steps"
