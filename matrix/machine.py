"""What a measurement was made on and with: the machine's kind, and the revision of this repository."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path


def machine_kind(gpu_name: str | None = None) -> str:
    """Return the kind of machine by which measurements are kept: `nvidia-h200`, or `cpu-2core` where no GPU is named.

    `gpu_name` is as the driver tells it (`NVIDIA H200`). Cores are those this process may use.
    """
    if gpu_name is not None:
        return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")
    return f"cpu-{_cores()}core"


def load_per_core() -> float | None:
    """Return the 1-minute load average divided by the cores this process may use: 1 is just busy. None where it's not kept."""
    try:
        return round(os.getloadavg()[0] / _cores(), 3)
    except (AttributeError, OSError):
        return None


def git_revision(directory: str | Path | None = None) -> str:
    """Return the commit checked out in a directory (default: this package's), 12 hex digits; `+` marks changed files.

    Returns `unknown` where there is no repository, no commit, or no git.
    """
    where = Path(directory) if directory is not None else Path(__file__).parent
    revision = _git(where, "rev-parse", "--short=12", "HEAD")
    if not revision:
        return "unknown"
    return revision + ("+" if _git(where, "status", "--porcelain", "--untracked-files=no") else "")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _git(where: Path, *arguments: str) -> str:
    """Return what a git command prints; nothing where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
