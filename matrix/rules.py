"""Which combinations are legal, and why not where they aren't. Each rule is one small function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matrix.cell import Cell
from matrix.model_shape import ModelShape

#: `(shape, cell, device)` -> why the combination is refused, with the values, or None. `device` None: on any device.
Check = Callable[[ModelShape, Cell, str | None], str | None]

#: Where each transport can hold weights: device types, None is any.
TRANSPORT_DEVICES: dict[str, tuple[str, ...] | None] = {
    "private": None,
    "shm": ("cpu",),
    "cuda_vmm": ("cuda",),
    "cuda_ipc": ("cuda",),
}
MODES = ("off", "client", "daemon")


@dataclass(frozen=True)
class Rule:
    """`id` is permanent; `sentence` says what is required; `source` where that comes from."""

    id: str
    sentence: str
    source: str
    check: Check


@dataclass(frozen=True)
class Violation:
    """A rule that a combination breaks, and how."""

    rule: Rule
    reason: str

    def __str__(self) -> str:
        return f"{self.rule.id}: {self.reason}"


def _tp_divides_query_heads(shape: ModelShape, cell: Cell, device: str | None) -> str | None:
    if shape.num_attention_heads % cell.layout.tp:
        return f"tp {cell.layout.tp} does not divide {shape.num_attention_heads} query heads"
    return None


def _tp_fits_kv_heads(shape: ModelShape, cell: Cell, device: str | None) -> str | None:
    tp, heads = cell.layout.tp, shape.num_key_value_heads
    if heads % tp and tp % heads:
        return f"neither of tp {tp} and {heads} KV heads divides the other"
    return None


def _tp_divides_intermediate(shape: ModelShape, cell: Cell, device: str | None) -> str | None:
    if shape.dense_layers and shape.intermediate_size % cell.layout.tp:
        return f"tp {cell.layout.tp} does not divide intermediate_size {shape.intermediate_size}"
    return None


def _tp_divides_moe_intermediate(shape: ModelShape, cell: Cell, device: str | None) -> str | None:
    if shape.moe_layers and shape.moe_intermediate_size % cell.layout.tp:
        return f"tp {cell.layout.tp} does not divide moe_intermediate_size {shape.moe_intermediate_size}"
    return None


def _mode_is_known(shape: ModelShape, cell: Cell, device: str | None) -> str | None:
    return None if cell.mode in MODES else f"mode {cell.mode!r} is none of {', '.join(MODES)}"


def _transport_fits_mode(shape: ModelShape, cell: Cell, device: str | None) -> str | None:
    if cell.mode == "off" and cell.transport != "private":
        return f"mode off shares nothing, so that transport {cell.transport!r} is not used; it must be 'private'"
    if cell.mode != "off" and cell.transport == "private":
        return f"mode {cell.mode} shares the weights; transport 'private' can't"
    return None


def _transport_fits_device(shape: ModelShape, cell: Cell, device: str | None) -> str | None:
    if cell.transport not in TRANSPORT_DEVICES:
        return f"transport {cell.transport!r} is none of {', '.join(TRANSPORT_DEVICES)}"
    devices = TRANSPORT_DEVICES[cell.transport]
    if device is not None and devices is not None and device.split(":", 1)[0] not in devices:
        return f"transport {cell.transport!r} can't hold weights on device {device!r}; it can on {', '.join(devices)}"
    return None


RULES = (
    Rule(
        "tp-query-heads",
        "The tensor-parallel size divides the number of query heads.",
        "SPEC.md section 1",
        _tp_divides_query_heads,
    ),
    Rule(
        "tp-kv-heads",
        "The tensor-parallel size divides the number of KV heads, or is a multiple of it (KV heads are then replicated).",
        "SPEC.md section 1",
        _tp_fits_kv_heads,
    ),
    Rule(
        "tp-intermediate",
        "The tensor-parallel size divides intermediate_size where a layer is dense.",
        "SPEC.md section 1",
        _tp_divides_intermediate,
    ),
    Rule(
        "tp-moe-intermediate",
        "The tensor-parallel size divides moe_intermediate_size where a layer has experts.",
        "SPEC.md section 1",
        _tp_divides_moe_intermediate,
    ),
    Rule("mode-known", "The weight-cache mode is one that engines have.", "SGLang --weight-cache-mode", _mode_is_known),
    Rule(
        "transport-mode",
        "Weights are private exactly where the weight cache is off.",
        "DESIGN.md section 5, modes",
        _transport_fits_mode,
    ),
    Rule(
        "transport-device",
        "The transport can hold weights on the device that the ranks run on.",
        "DESIGN.md section 5, transports",
        _transport_fits_device,
    ),
)


def decide(shape: ModelShape, cell: Cell, device: str | None = None) -> list[Violation]:
    """Return the rules that a cell of a model of this shape breaks; none where it is legal.

    `device` is `cpu`, `cuda` or `cuda:0`; without it, a cell is legal that is legal on some device.
    """
    found = [(rule, rule.check(shape, cell, device)) for rule in RULES]
    return [Violation(rule, reason) for rule, reason in found if reason is not None]
