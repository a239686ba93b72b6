"""The command line and the page of arguments, made from one declaration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import reference
from reference.args import NAMESPACES, declarations
from reference.command_line import arguments_page


@pytest.mark.parametrize("command", ["daemon", "engine"])
def test_help_is_grouped_by_namespace_and_complete(command: str) -> None:
    argv = [sys.executable, "-m", f"reference.{command}", "--help"]
    text = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    titles = [text.index(f"\n{title}:\n") for title in NAMESPACES.values()]
    assert titles == sorted(titles)
    ends = [*titles[1:], len(text)]
    groups = dict(zip(NAMESPACES, (text[a:b] for a, b in zip(titles, ends, strict=True)), strict=True))
    for declaration in declarations().values():
        assert all(flag in groups[declaration.namespace] for flag in declaration.flags), declaration


def test_the_page_of_arguments_is_the_declarations() -> None:
    page = Path(reference.__file__).with_name("ARGUMENTS.md")
    assert page.read_text() == arguments_page(), "run `python -m reference.command_line > reference/ARGUMENTS.md`"


def test_a_refused_command_line_costs_no_torch() -> None:
    """Help and refusals come before anything heavy is imported."""
    code = (
        "import sys; from reference.command_line import ENGINE; from reference.engine.forkserver import run_command;"
        "status = run_command(ENGINE, 'reference.engine.launcher', ['--model-path', '/nowhere']);"
        "sys.exit(10 * ('torch' in sys.modules) + status)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True).returncode == 1
