"""What classes are expected to take, read from `ci/est_time.json`, which `python -m ci.calibrate` keeps."""

from __future__ import annotations

from pathlib import Path

import msgspec

EST_TIME_FORMAT = 1

#: Seconds by machine kind, then class name.
EstTimes = dict[str, dict[str, float]]


class _Estimate(msgspec.Struct):
    est_time: float


class _Content(msgspec.Struct):
    format: int
    machines: dict[str, dict[str, _Estimate]]


def read_est_times(path: Path) -> EstTimes:
    """Return each class's seconds; nothing where the file is missing.

    Raises ValueError, one line, for a file that can't be read.
    """
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_Content)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if content.format != EST_TIME_FORMAT:
        raise ValueError(f"{path}: format is {content.format}; this version reads {EST_TIME_FORMAT}")
    return {kind: {name: one.est_time for name, one in classes.items()} for kind, classes in content.machines.items()}
