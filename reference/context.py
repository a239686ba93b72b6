"""The published configuration: what every reader in a process reads, and nothing else.

`publish` freezes one bag of values a namespace; `override` is the only other writer, and leaves a record. Readers call
`get_parallel()`, `get_exec()`, `get_cache()`, `get_model()`, `get_server()`. Sizes and ranks of groups that exist are
read live and shadow the configured values of the same name, so that a name can't have two values.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reference.args import NAMESPACES, ServerArgs, declarations
from reference.errors import ArgumentRefusal

if TYPE_CHECKING:
    from reference.parallel import Group


@dataclass(frozen=True)
class Ranks:
    """Where a process stands. Both are 0-based; a process that is no rank (a launcher) publishes none."""

    tp_rank: int = 0
    local_rank: int = 0


@dataclass(frozen=True)
class Override:
    """One permanent change of a published value: why, what, and when (Unix seconds)."""

    reason: str
    name: str
    old: Any
    new: Any
    time: float


class Bag:
    """The published values of one namespace, as plain attributes. Only this module writes to it."""

    def __init__(self, namespace: str, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self.__dict__["_namespace"] = namespace

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self._namespace}.{name}: published values change only by get_context().override()")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{name}: not a published {self._namespace} config leaf")


class ParallelContext:
    """Reader of the `parallel` namespace, with the live groups in front of the configured values."""

    __slots__ = ("_bag", "_groups", "_ranks")

    def __init__(self) -> None:
        self._bag: dict[str, Any] | None = None
        self._groups: dict[str, Group] = {}
        self._ranks: Ranks | None = None

    @property
    def tp_size(self) -> int:
        """Tensor parallel size of the group that exists."""
        return self._group("tp").size

    @property
    def tp_rank(self) -> int:
        """This process's rank in the tensor parallel group."""
        return self._group("tp").rank

    @property
    def tp_group(self) -> Group:
        """The tensor parallel group."""
        return self._group("tp")

    @property
    def local_rank(self) -> int:
        """This process's index among the ranks of this host."""
        if self._ranks is None:
            raise ArgumentRefusal("local_rank: config not published for a rank")
        return self._ranks.local_rank

    def configured(self, name: str) -> Any:
        """Return the published value that a live group shadows. For making that group, and for diagnostics."""
        if self._bag is None:
            raise AttributeError(f"{name}: config not published")
        if name not in self._bag:
            raise AttributeError(f"{name}: not a published parallel config leaf")
        return self._bag[name]

    def _group(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            raise RuntimeError(f"{name} group: read before it exists; call parallel.initialize_groups() first")
        return group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._bag is None:
            raise AttributeError(f"{name}: config not published")
        if name not in self._bag:
            raise AttributeError(f"{name}: not a published parallel config leaf")
        return self._bag[name]


class Context:
    """All that is published in this process."""

    def __init__(self) -> None:
        self._args: ServerArgs | None = None
        self._bags: dict[str, Bag] = {}
        self._parallel = ParallelContext()
        self._overrides: list[Override] = []

    def override(self, reason: str, **fields: Any) -> None:
        """Change published values for good, all or none, and record it.

        Raises `AttributeError` for a name that is not published, and `ArgumentRefusal` for a size that a live group
        decides.
        """
        if not self._bags:
            raise ArgumentRefusal(f"override ({reason}): config not published")
        known = declarations()
        for name in fields:
            if name not in known:
                raise AttributeError(f"{name}: not a published config leaf (override: {reason})")
            if known[name].namespace == "parallel" and isinstance(getattr(ParallelContext, name, None), property):
                raise ArgumentRefusal(f"{name}: decided by the live group, can't be overridden (override: {reason})")
        for name, value in fields.items():
            values = self._bags[known[name].namespace].__dict__
            self._overrides.append(Override(reason, name, values[name], value, time.time()))
            values[name] = value

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return every published value by namespace, for `/server_info` and a daemon's status."""
        return {name: {k: v for k, v in bag.__dict__.items() if k[0] != "_"} for name, bag in self._bags.items()}

    def arguments(self) -> dict[str, Any]:
        """Return the launch arguments as given, for diagnostics."""
        return dataclasses.asdict(get_server_args())

    def overrides(self) -> list[dict[str, Any]]:
        """Return the record of permanent overrides, oldest first."""
        return [dataclasses.asdict(entry) for entry in self._overrides]


_context = Context()


def publish(args: ServerArgs, ranks: Ranks | None) -> None:
    """Freeze the configuration of this process, in place of what was published before."""
    _context._args = args
    _context._overrides.clear()
    known = declarations()
    _context._bags = {
        namespace: Bag(namespace, {n: getattr(args, n) for n, d in known.items() if d.namespace == namespace})
        for namespace in NAMESPACES
    }
    _context._parallel = parallel = ParallelContext()
    parallel._bag = _context._bags["parallel"].__dict__
    parallel._bag["world_size"] = args.tp_size
    parallel._ranks = ranks


def install_group(name: str, group: Group) -> None:
    """Let `group` answer for its sizes and ranks from now on.

    Raises `ArgumentRefusal` where its size is not the published one: a name must not have two values.
    """
    parallel = _context._parallel
    configured = parallel.configured(f"{name}_size")
    if configured != group.size:
        raise ArgumentRefusal(
            f"{name}_size: published as {configured}, but the group that was made has {group.size} ranks"
        )
    parallel._groups[name] = group


def get_context() -> Context:
    """Return the process's context: overrides and the snapshot."""
    return _context


def get_parallel() -> ParallelContext:
    """Return the reader of parallel sizes, ranks and groups."""
    return _context._parallel


def get_model() -> Any:
    """Return the published `model` values."""
    return _bag("model")


def get_exec() -> Any:
    """Return the published `exec` values."""
    return _bag("exec")


def get_cache() -> Any:
    """Return the published `cache` values."""
    return _bag("cache")


def get_server() -> Any:
    """Return the published `server` values."""
    return _bag("server")


def get_server_args() -> ServerArgs:
    """Return the raw launch arguments. For diagnostics alone: readers of configuration use the namespaces."""
    if _context._args is None:
        raise AttributeError("server args: config not published")
    return _context._args


def _bag(namespace: str) -> Bag:
    bag = _context._bags.get(namespace)
    if bag is None:
        raise AttributeError(f"{namespace}: config not published")
    return bag
