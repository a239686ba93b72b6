"""SGLang's registration calls in test sources, `register_cuda_ci(est_time=100, suite="...")`: read them, change that number.

They are no-ops that a runner reads by syntax tree, at the top level of a module, with constant arguments; this module reads
them likewise, without importing the file. Source: SGLang `python/sglang/test/ci/ci_register.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CALL = re.compile(r"register_([a-z0-9]+)_ci")
#: What may be given by position, in order.
_POSITIONAL = ("est_time", "suite", "nightly", "disabled")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class RegistrationError(Exception):
    """A test source whose registration can't be read or rewritten; the text is one line with file and line."""


@dataclass(frozen=True)
class Registration:
    """One call. `backend`: `cuda`, `amd`, `cpu`, ... `est_time`: seconds, as written (an int or a float).

    `suite`: its name, or `STAGE-test-RUNNER` where those two are given. `disabled`: the reason, where it doesn't run.
    `line`: from 1. `start`, `end`: the bytes of the number in the file.
    """

    path: str
    backend: str
    est_time: int | float
    suite: str | None
    disabled: str | None
    line: int
    start: int
    end: int


def read_registrations(source: bytes, path: str) -> tuple[Registration, ...]:
    """Return a source's registrations, in order; none where it has no such call. Raises `RegistrationError`.

    Refused: what is no Python or not UTF-8, starred arguments, an `est_time` that is missing, no plain number, or not
    above 0.
    """
    try:
        source.decode("utf-8")
        tree = ast.parse(source, filename=path)
    except UnicodeDecodeError as error:
        raise RegistrationError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise RegistrationError(f"{path}:{line}: not Python: {getattr(error, 'msg', None) or error}") from error
    starts = _line_starts(source)
    found = []
    for statement in tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            named = _CALL.fullmatch(call.func.id)
            if named:
                found.append(_read_call(call, named[1], path, starts))
    return tuple(found)


def set_est_times(source: bytes, values: Mapping[Registration, int | float]) -> bytes:
    """Return the source with other numbers in some of its own registrations, and not a byte changed elsewhere.

    Raises `RegistrationError` for a registration of another text, or where the result would read otherwise, and
    ValueError for a number not above 0.
    """
    changed = source
    for path in {one.path for one in values}:
        own = read_registrations(source, path)
        strange = [one for one in values if one.path == path and one not in own]
        if strange:
            raise RegistrationError(f"{path}:{strange[0].line}: has changed since it was read; read it again")
    for one, value in sorted(values.items(), key=lambda item: -item[0].start):
        if isinstance(value, bool) or not 0 < value < float("inf"):
            raise ValueError(f"{one.path}:{one.line}: est_time {value}; a number of seconds above 0 expected")
        changed = changed[: one.start] + repr(value).encode() + changed[one.end :]
    for path in {one.path for one in values}:
        expected = [values.get(one, one.est_time) for one in read_registrations(source, path)]
        got = [one.est_time for one in read_registrations(changed, path)]
        if got != expected:
            raise RegistrationError(f"{path}: rewriting gives est_time {got}, not {expected}; change it by hand")
    return changed


def registrations_below(directory: str | Path) -> tuple[Registration, ...]:
    """Return the registrations of every `*.py` below a directory, by path. Raises `RegistrationError`."""
    directory = Path(directory)
    if not directory.is_dir():
        raise RegistrationError(f"{directory}: no such directory")
    found: list[Registration] = []
    for path in sorted(directory.rglob("*.py")):
        try:
            source = path.read_bytes()
        except OSError as error:
            raise RegistrationError(f"{path}: {error.strerror}") from error
        if b"register_" in source:  # most files have none; they need not even be Python of this version
            found += read_registrations(source, str(path))
    return tuple(found)


def _read_call(call: ast.Call, backend: str, path: str, starts: list[int]) -> Registration:
    where = f"{path}:{call.lineno}: register_{backend}_ci"
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        raise RegistrationError(f"{where}: starred arguments; write est_time=SECONDS out, it is read without running")
    if len(call.args) > len(_POSITIONAL):
        raise RegistrationError(f"{where}: {len(call.args)} positional arguments; {len(_POSITIONAL)} are allowed")
    given: dict[str, ast.expr] = dict(zip(_POSITIONAL, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg in given:
            raise RegistrationError(f"{where}: {keyword.arg} is given twice")
        given[str(keyword.arg)] = keyword.value
    number = given.get("est_time")
    if number is None:
        raise RegistrationError(f"{where}: no est_time; write est_time=SECONDS")
    value = number.value if isinstance(number, ast.Constant) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RegistrationError(
            f"{where}: est_time is {ast.unparse(number)}; a plain number is needed, to be rewritten"
        )
    if not 0 < value < float("inf"):
        raise RegistrationError(f"{where}: est_time is {value}; seconds above 0 are allowed")
    stage, runner = _text(given.get("stage")), _text(given.get("runner_config"))
    return Registration(
        path=path,
        backend=backend,
        est_time=value,
        suite=f"{stage}-test-{runner}" if stage and runner else _text(given.get("suite")),
        disabled=_text(given.get("disabled")),
        line=call.lineno,
        start=starts[number.lineno - 1] + number.col_offset,
        end=starts[(number.end_lineno or number.lineno) - 1] + (number.end_col_offset or 0),
    )


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _line_starts(source: bytes) -> list[int]:
    """Return the byte at which each line begins, as the parser counts lines and columns: a byte order mark is no column."""
    first = len(_BOM) if source.startswith(_BOM) else 0
    return [first, *(found.end() for found in _LINE_END.finditer(source))]
