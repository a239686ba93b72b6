"""A target is what its TOML file says."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from conformance.targets import BadTarget, load_target

TARGET = r"""
name = "miniature"
version = ["{python}", "-c", "print('torch warns'); print('1.2.3')"]
stop_signal = "SIGINT"
[environment]
LEVEL = "1"
[daemon]
command = ["{python}", "daemon.py", "{model}", "{arguments}", "--last"]
ready = 'ready: (?P<ranks>\d+)'
[server]
command = ["serve", "--model={model}"]
ready = 'ready: (?P<url>\S+)'
[arguments]
client = ["--cache"]
transport = ["--via", "{transport}"]
device = ["--on={device}"]
"""


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "target.toml").write_text(text)
    return str(tmp_path / "target.toml")


def test_templates_become_command_lines(tmp_path: Path) -> None:
    target = load_target(write(tmp_path, TARGET))
    argv = target.daemon.argv(["--tp-size", "2"], model="/m")
    assert argv == [sys.executable, "daemon.py", "/m", "--tp-size", "2", "--last"]
    assert target.mode_arguments("client", "shm") == ["--cache", "--via", "shm"]
    assert target.mode_arguments("off", "private") == []
    assert target.transport_arguments("shm") == ["--via", "shm"]
    assert target.device_arguments("cpu") == ["--on=cpu"]
    assert target.signal is signal.SIGINT
    assert target.environment == {"LEVEL": "1"}
    assert target.fork_server is None
    with pytest.raises(KeyError, match="sideways"):
        target.mode_arguments("sideways", "shm")
    with pytest.raises(KeyError, match="model"):
        target.daemon.argv()


def test_version_is_the_last_line(tmp_path: Path) -> None:
    assert load_target(write(tmp_path, TARGET)).ask_version() == "1.2.3"


@pytest.mark.parametrize(
    ("command", "told"),
    [('["no-such-program"]', "unknown (*No such file*"), ('["false"]', "unknown (exit status 1)")],
)
def test_version_that_cannot_be_asked_is_no_version(tmp_path: Path, command: str, told: str) -> None:
    lines = [f"version = {command}" if line.startswith("version") else line for line in TARGET.splitlines()]
    version = load_target(write(tmp_path, "\n".join(lines))).ask_version()
    assert Path(version).match(told), version


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[daemon]", "[daemon", r"\(at line"),
        ("(?P<ranks>", "(", r"daemon\.ready: .* has no group \(\?P<ranks>"),
        ("(?P<url>", "(?P<url", r"server\.ready: "),
        ('["serve", "--model={model}"]', '"serve"', r"Expected `array`, got `str` - at `\$\.server\.command`"),
        ("SIGINT", "SIGNONE", "stop_signal: 'SIGNONE' is no signal"),
        ('name = "miniature"', "", "missing required field `name`"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in TARGET
    with pytest.raises(BadTarget, match=rf"target\.toml: .*{told}"):
        load_target(write(tmp_path, TARGET.replace(old, new)))


def test_unknown_name_says_which_there_are() -> None:
    with pytest.raises(BadTarget, match=r"no such target; there are .*reference"):
        load_target("nobody")


def test_every_target_of_the_suite_can_be_read() -> None:
    from conformance.targets import target

    names = [path.stem for path in target.HERE.glob("*.toml")]
    assert "reference" in names
    assert [load_target(name).name for name in names] == names
