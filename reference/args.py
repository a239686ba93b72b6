"""Every launch argument, declared once.

The command line, its help, validation, the published namespaces, `/server_info` and what a daemon reports are all made
from the fields of `ServerArgs`. Names follow SGLang's server arguments where it has them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, get_type_hints

from reference import __version__
from reference.errors import ArgumentRefusal

NAMESPACES = {
    "model": "model: which checkpoint, and how its tensors are read",
    "parallel": "parallel: how the model is spread over ranks",
    "exec": "exec: how batches are run",
    "cache": "cache: the weight cache daemon",
    "server": "server: HTTP and logging",
}


@dataclass(frozen=True)
class Declaration:
    """What is known of one argument besides its type and default.

    `changes_bytes` says whether another value can change which bytes a rank holds, given the same checkpoint.
    """

    flags: tuple[str, ...]
    namespace: str
    help: str
    changes_bytes: bool
    choices: tuple[Any, ...] | None
    minimum: int | None
    maximum: int | None


def argument(
    *flags: str,
    namespace: str,
    help: str,
    default: Any = dataclasses.MISSING,
    changes_bytes: bool = False,
    choices: tuple[Any, ...] | None = None,
    minimum: int | None = None,
    maximum: int | None = None,
) -> Any:
    """Declare a field of `ServerArgs`. An argument without a default is required; a `bool` is a switch."""
    declaration = Declaration(flags, namespace, help, changes_bytes, choices, minimum, maximum)
    return field(default=default, metadata={"declaration": declaration})


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """The launch arguments as given. Only `context.publish` reads them; everyone else reads what was published."""

    model_path: str = argument(
        "--model-path",
        "--model",
        namespace="model",
        changes_bytes=True,
        help="directory of a Hugging Face checkpoint: config.json, safetensors shards, tokenizer.json",
    )
    served_model_name: str | None = argument(
        "--served-model-name",
        namespace="model",
        default=None,
        help="name that /v1/models and replies give; the directory's name when left out",
    )
    dtype: str = argument(
        "--dtype",
        namespace="model",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        changes_bytes=True,
        help="element type of the weights a rank holds; auto takes the checkpoint's",
    )
    context_length: int | None = argument(
        "--context-length",
        namespace="model",
        default=None,
        minimum=1,
        help="longest sequence, in tokens; the model's max_position_embeddings when left out",
    )
    device: str = argument(
        "--device",
        namespace="model",
        default="cpu",
        choices=("cpu",),
        help="where weights live and batches run",
    )
    tp_size: int = argument(
        "--tp-size",
        "--tp",
        namespace="parallel",
        default=1,
        minimum=1,
        changes_bytes=True,
        help="tensor parallel size: one process a rank",
    )
    base_gpu_id: int = argument(
        "--base-gpu-id",
        namespace="parallel",
        default=0,
        minimum=0,
        help="device index of local rank 0; local rank r uses the one r further on",
    )
    random_seed: int = argument(
        "--random-seed",
        namespace="exec",
        default=42,
        minimum=0,
        help="seed of sampled decoding where a request brings none",
    )
    max_running_requests: int = argument(
        "--max-running-requests",
        namespace="exec",
        default=64,
        minimum=1,
        help="requests decoded together at the most",
    )
    max_total_tokens: int = argument(
        "--max-total-tokens",
        namespace="exec",
        default=8192,
        minimum=16,
        help="tokens that the KV pool holds",
    )
    max_prefill_tokens: int = argument(
        "--max-prefill-tokens",
        namespace="exec",
        default=4096,
        minimum=1,
        help="prompt tokens run in one prefill batch; a longer prompt gets a batch of its own",
    )
    page_size: int = argument(
        "--page-size",
        namespace="exec",
        default=16,
        minimum=1,
        help="tokens a block of the KV pool",
    )
    weight_cache_mode: str = argument(
        "--weight-cache-mode",
        namespace="cache",
        default="off",
        choices=("off", "client", "daemon"),
        help="off reads the disk; client attaches to a daemon that is there; daemon starts one, then attaches",
    )
    weight_cache_transport: str = argument(
        "--weight-cache-transport",
        namespace="cache",
        default="auto",
        choices=("auto", "shm"),
        help="how the slab is shared; auto is shm (a sealed memfd) on cpu",
    )
    weight_cache_fallback: str = argument(
        "--weight-cache-fallback",
        namespace="cache",
        default="refuse",
        choices=("refuse", "disk"),
        help="what client does when no daemon holds this rank's key: refuse to start, or say so and read the disk",
    )
    weight_cache_detach: bool = argument(
        "--weight-cache-detach",
        namespace="cache",
        default=False,
        help="daemon mode: leave the daemon running when the engine ends",
    )
    weight_cache_timeout: float = argument(
        "--weight-cache-timeout",
        namespace="cache",
        default=1800.0,
        minimum=1,
        help="seconds to wait for a daemon that is still loading",
    )
    weight_cache_verify: str = argument(
        "--weight-cache-verify",
        namespace="cache",
        default="full",
        choices=("full", "skip"),
        help="full digests every mapped tensor before serving; skip trusts the daemon and says so in /server_info",
    )
    checkpoint_verify: str = argument(
        "--checkpoint-verify",
        namespace="cache",
        default="full",
        choices=("full", "sampled"),
        help="how client compares shard files nobody has digested yet with the daemon's: every byte, or samples only",
    )
    host: str = argument("--host", namespace="server", default="127.0.0.1", help="address to listen on")
    port: int = argument(
        "--port",
        namespace="server",
        default=30000,
        minimum=0,
        maximum=65535,
        help="port to listen on; 0 takes a free one and prints it",
    )
    log_level: str = argument(
        "--log-level",
        namespace="server",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="least severe message that is printed",
    )


def declarations() -> dict[str, Declaration]:
    """Return each argument's declaration by field name, in the order of the help."""
    return {f.name: f.metadata["declaration"] for f in dataclasses.fields(ServerArgs)}


def changes_bytes() -> tuple[str, ...]:
    """Return the names of the arguments that can change which bytes a rank holds."""
    return tuple(name for name, declaration in declarations().items() if declaration.changes_bytes)


@dataclass(frozen=True)
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
    parser = _Parser(prog=command.prog, description=command.description, allow_abbrev=False)
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
        if declaration.choices is not None and value not in declaration.choices:
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
