"""`ci/est_time.json`: the estimates by machine kind and class. Its `git log` is their history, so its text is stable."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec

from ci.estimate import Estimate

EST_TIME_FORMAT = 1
#: Where the estimates of this suite are kept.
DEFAULT_PATH = Path(__file__).parent / "est_time.json"

#: Estimates by machine kind, then class name.
EstTimes = dict[str, dict[str, Estimate]]


class EstTimeFileError(Exception):
    """A file of estimates that can't be read; the text is one line that names it."""


class _Envelope(msgspec.Struct):
    format: int


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    machines: EstTimes


def read_est_times(path: str | Path = DEFAULT_PATH, *, missing_ok: bool = False) -> EstTimes:
    """Return a file's estimates; nothing where it's missing and that is `missing_ok`.

    Raises `EstTimeFileError`, also for a newer format and for times that aren't above 0.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise EstTimeFileError(f"{path}: no such file; `python -m ci.calibrate --write` makes it") from error
    except OSError as error:
        raise EstTimeFileError(f"{path}: {error.strerror}") from error
    try:
        found = msgspec.json.decode(data, type=_Envelope).format
        if found != EST_TIME_FORMAT:
            raise EstTimeFileError(f"{path}: format is {found}; this version reads {EST_TIME_FORMAT}")
        machines = msgspec.json.decode(data, type=_Content).machines
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EstTimeFileError(f"{path}: {error}") from error
    for machine, classes in machines.items():
        for name, one in classes.items():
            if not (one.est_time > 0 and one.timeout >= 0):
                given = f"est_time {one.est_time}, timeout {one.timeout}"
                raise EstTimeFileError(f"{path}: {machine}/{name}: {given}; both are seconds above 0")
    return machines


def encode_est_times(times: Mapping[str, Mapping[str, Estimate]]) -> bytes:
    """Return the text of a file: machines and classes sorted, one field a line, None left out."""
    machines = {
        machine: {name: _fields(classes[name]) for name in sorted(classes)}
        for machine, classes in sorted(times.items())
        if classes
    }
    content = msgspec.json.encode({"format": EST_TIME_FORMAT, "machines": machines})
    return msgspec.json.format(content, indent=2) + b"\n"


def write_est_times(path: str | Path, times: Mapping[str, Mapping[str, Estimate]]) -> bool:
    """Write a file, whole or not at all; return whether its text changed. Raises OSError."""
    path, data = Path(path), encode_est_times(times)
    if path.exists() and path.read_bytes() == data:
        return False
    write_whole(path, data)
    return True


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that no reader sees a part of it, and a killed writer leaves the old one. Raises OSError."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(draft, mode)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _fields(one: Estimate) -> dict[str, object]:
    return {name: value for name, value in asdict(one).items() if value not in (None, "")}
