"""Finds, by syntax tree, the ways round the published configuration: see `test_ratchet`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

RAW = "raw argument reads"
OVERRIDES = "permanent overrides"
GUESSES = "getattr with a default on configuration"

#: The rooms that make and publish arguments.
OWNERS = ("args.py", "command_line.py", "context.py")
_RAW_SOURCES = ("ServerArgs", "get_server_args", "parse_args")
_READERS = ("get_parallel", "get_exec", "get_cache", "get_model", "get_server", "get_context", *_RAW_SOURCES)


def scan(root: Path) -> Iterator[tuple[str, str]]:
    """Yield `(kind, place)` of every finding below `root`; a place reads `file:line: source`."""
    for file in sorted(root.rglob("*.py")):
        for kind, node in find(ast.parse(file.read_text())):
            if kind != RAW or file.name not in OWNERS:
                yield kind, f"{file.relative_to(root)}:{node.lineno}: {ast.unparse(node)}"


def find(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the findings of one module. Follows names that are bound to configuration, and names of those names."""
    names = _bound(tree, _READERS)
    raw = _bound(tree, _RAW_SOURCES)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, ctx=ast.Load()) if _is(value, raw, _RAW_SOURCES):
                yield RAW, node
            case ast.Call(func=ast.Attribute(value=value, attr="override")) if _is(value, names, ("get_context",)):
                yield OVERRIDES, node
            case ast.Call(func=ast.Name("getattr"), args=[value, _, _]) if _is(_root(value), names, _READERS):
                yield GUESSES, node
            case ast.Call(func=ast.Name("getattr"), args=[value, _]) if _is(value, raw, _RAW_SOURCES):
                yield RAW, node
            case _:
                continue


def _bound(tree: ast.Module, sources: tuple[str, ...]) -> set[str]:
    """Return the names that hold what `sources` give: parameters typed so, and assignments, copies of copies included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            mentioned = {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}
            if isinstance(node.annotation, ast.Constant):
                mentioned |= {source for source in sources if source in str(node.annotation.value)}
            names |= {node.arg} if mentioned & set(sources) else set()
    while True:
        before = len(names)
        for targets, value in _assignments(tree):
            if _is(_root(value), names, sources):
                names |= {ast.unparse(target) for target in targets if isinstance(target, ast.Name | ast.Attribute)}
        if len(names) == before:
            return names


def _assignments(tree: ast.Module) -> Iterator[tuple[list[ast.expr], ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield node.targets, node.value
        elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value is not None:
            yield [node.target], node.value


def _root(node: ast.expr) -> ast.expr:
    """Return what an attribute chain starts with, so that `get_exec().moe` counts as `get_exec()`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _is(node: ast.expr, names: set[str], sources: tuple[str, ...]) -> bool:
    match node:
        case ast.Call(func=ast.Name(called)):
            return called in sources
        # A method of this name is argparse's own.
        case ast.Call(func=ast.Attribute(attr=called)):
            return called in sources and called != "parse_args"
        case ast.Name() | ast.Attribute():
            return ast.unparse(node) in names
    return False
