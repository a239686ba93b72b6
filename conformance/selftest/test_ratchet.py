"""Configuration is read as published: counts of the ways round it may only go down.

Baselines are in `ratchet.json`. More findings fail with their places; fewer ask to lower the number.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from pathlib import Path

import pytest

import reference
from conformance.selftest.configuration_reads import GUESSES, OVERRIDES, RAW, find, scan

BASELINES: dict[str, int] = json.loads(Path(__file__).with_name("ratchet.json").read_text())
ROOM = Path(reference.__file__).parent


@pytest.fixture(scope="module")
def findings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for kind, place in scan(ROOM):
        found[kind].append(place)
    return found


@pytest.mark.parametrize("kind", BASELINES)
def test_ways_round_the_published_configuration_only_get_fewer(findings: dict[str, list[str]], kind: str) -> None:
    places, allowed = findings[kind], BASELINES[kind]
    listed = "\n".join(places)
    assert len(places) <= allowed, f"{kind}: {len(places)} found, {allowed} allowed:\n{listed}"
    assert len(places) == allowed, f"{kind}: only {len(places)} are left, lower the baseline from {allowed}"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("def f(args: ServerArgs):\n    return args.tp_size", RAW),
        ("def f(args: 'ServerArgs | None'):\n    return args.tp_size", RAW),
        ("x = get_server_args().tp_size", RAW),
        ("args = parse_args(argv, ENGINE)\nx = args.port", RAW),
        ("a = get_server_args()\nb = a\nc = b\nx = c.port", RAW),
        ("class C:\n    def f(self):\n        self.args = get_server_args()\n        return self.args.port", RAW),
        ("if (a := get_server_args()):\n    x = a.port", RAW),
        ("x = getattr(get_server_args(), 'port')", RAW),
        ("get_context().override('why', page_size=2)", OVERRIDES),
        ("c = get_context()\nc.override('why', page_size=2)", OVERRIDES),
        ("x = getattr(get_parallel(), 'ep_size', 1)", GUESSES),
        ("x = getattr(get_exec().moe, 'enable_eplb', False)", GUESSES),
        ("m = get_exec().moe\nx = getattr(m, 'enable_eplb', False)", GUESSES),
    ],
)
def test_a_planted_way_round_is_found(source: str, kind: str) -> None:
    assert [found for found, _ in find(ast.parse(source))] == [kind]


@pytest.mark.parametrize(
    "source",
    [
        "x = get_parallel().tp_size",
        "publish(get_server_args(), ranks)",
        "x = getattr(module, 'expert_slots', {})",
        "x = settings.override('why')",
        "args = [1]\nx = args.index(1)",
        "options = parser.parse_args(argv)\nx = options.socket",
    ],
)
def test_a_straight_read_is_not(source: str) -> None:
    assert list(find(ast.parse(source))) == []


def test_a_violation_in_a_room_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "args.py").write_text("x = get_server_args().port\n")
    (tmp_path / "worker.py").write_text("import y\nx = get_server_args().port\n")
    assert list(scan(tmp_path)) == [(RAW, "worker.py:2: get_server_args().port")]
