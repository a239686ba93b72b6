"""The command line that the declared arguments make: parser, help, validation, and the page that lists them."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, get_type_hints

from reference import __version__
from reference.args import NAMESPACES, Declaration, ServerArgs, declarations
from reference.errors import ArgumentRefusal


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of this package, as its help shows it."""

    prog: str
    description: str


ENGINE = Command(
    "python -m reference.engine",
    "Serve a model over HTTP (SGLang's and OpenAI's routes), its weights from the disk or from a weight cache daemon."
    " Prints `ready: URL` when it serves.",
)
DAEMON = Command(
    "python -m reference.daemon",
    "Keep a model's finished weights in memory, one process a rank, for engines to map. Takes the engine's arguments, so"
    " that both derive the same key. Prints `ready: ...` when every rank serves.",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentRefusal(f"{message} (see `{self.prog} --help`)")


def make_parser(command: Command) -> argparse.ArgumentParser:
    """Return a parser of all declared arguments, its help grouped by namespace."""
    usage = f"{command.prog} --model-path DIR [options]"
    parser = _Parser(command.prog, usage, command.description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"reference {__version__}")
    groups = {name: parser.add_argument_group(title) for name, title in NAMESPACES.items()}
    hints = get_type_hints(ServerArgs)
    for spec in dataclasses.fields(ServerArgs):
        declaration: Declaration = spec.metadata["declaration"]
        required = spec.default is dataclasses.MISSING
        shown = "" if required or spec.default is None or spec.default is False else f" (default: {spec.default})"
        options: dict[str, Any] = {"dest": spec.name, "help": declaration.help + shown}
        if hints[spec.name] is bool:
            options |= {"action": "store_true"}
        else:
            kinds = [kind for kind in (int, float, str) if kind in (hints[spec.name], *_members(hints[spec.name]))]
            options |= {"type": kinds[0], "required": required, "choices": declaration.choices}
            options |= {} if required else {"default": spec.default}
            options |= {} if declaration.choices else {"metavar": kinds[0].__name__.upper()}
        groups[declaration.namespace].add_argument(*declaration.flags, **options)
    return parser


def parse_args(argv: Sequence[str], command: Command) -> ServerArgs:
    """Parse and validate a command line.

    Raises `ArgumentRefusal` naming the flag, what was given and what is allowed. Exits with status 0 on `--help` and
    `--version`.
    """
    args = ServerArgs(**vars(make_parser(command).parse_args(list(argv))))
    check_args(args)
    return args


def check_args(args: ServerArgs) -> None:
    """Check each value against its declaration. Raises `ArgumentRefusal`."""
    for name, declaration in declarations().items():
        flag, value = declaration.flags[0], getattr(args, name)
        if value is not None and declaration.choices is not None and value not in declaration.choices:
            allowed = ", ".join(map(str, declaration.choices))
            raise ArgumentRefusal(f"{flag}: {value!r} is not one of {allowed}")
        if value is not None and declaration.minimum is not None and not value >= declaration.minimum:
            raise ArgumentRefusal(f"{flag}: {value} is too small, at least {declaration.minimum} is needed")
        if value is not None and declaration.maximum is not None and value > declaration.maximum:
            raise ArgumentRefusal(f"{flag}: {value} is too large, at most {declaration.maximum} is allowed")
    if not os.path.isdir(args.model_path):
        raise ArgumentRefusal(
            f"--model-path: {args.model_path} is not a directory; give that of a Hugging Face checkpoint"
        )
    if args.weight_cache_detach and args.weight_cache_mode != "daemon":
        raise ArgumentRefusal(
            f"--weight-cache-detach: only with --weight-cache-mode daemon, given {args.weight_cache_mode}"
        )


def _members(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", ())


def arguments_page() -> str:
    """Return `ARGUMENTS.md`: every argument with its default and whether it can change cached bytes."""
    lines = [
        "# Launch arguments",
        "",
        "Of `python -m reference.engine` and `python -m reference.daemon` alike. Made from `args.py` by",
        "`python -m reference.command_line > reference/ARGUMENTS.md`. *Bytes*: another value can change which bytes a rank",
        "holds, given the same checkpoint; a daemon and an engine that differ in it can have different keys. Which do is",
        "decided by the planned tensors, not by this list.",
    ]
    defaults = {spec.name: spec.default for spec in dataclasses.fields(ServerArgs)}
    for namespace, title in NAMESPACES.items():
        lines += ["", f"## `{namespace}`", "", f"{title.partition(': ')[2].capitalize()}.", ""]
        lines += ["| argument | default | bytes | meaning |", "| --- | --- | --- | --- |"]
        for name, declaration in declarations().items():
            if declaration.namespace == namespace:
                flags = ", ".join(f"`{flag}`" for flag in declaration.flags)
                shown = "required" if defaults[name] is dataclasses.MISSING else f"`{_spell(defaults[name])}`"
                allowed = f" One of {', '.join(f'`{c}`' for c in declaration.choices)}." if declaration.choices else ""
                meaning = f"{declaration.help[0].upper()}{declaration.help[1:]}.{allowed}"
                lines.append(f"| {flags} | {shown} | {'yes' if declaration.changes_bytes else ''} | {meaning} |")
    return "\n".join(lines) + "\n"


def _spell(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return "none" if default is None else "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    sys.stdout.write(arguments_page())
