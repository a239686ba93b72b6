"""A cell in words: what it is, whether it is legal, how to run it by hand, and what each of its ranks holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from matrix.cell import Cell
from matrix.generate import cells
from matrix.oracle import ManifestTensor, RankExpectation, Source, expected_ranks
from matrix.report.terminal import render_table
from matrix.rules import RULES, Violation, decide
from matrix.space import Space

MODE_MEANINGS = {
    "off": "the engine reads the weights from disk, for itself",
    "client": "the engine attaches to a daemon that is already there",
    "daemon": "the engine starts its daemon, then attaches to it",
}


def explain(space: Space, cell: Cell, checkpoint: Path | None = None) -> str:
    """Return the explanation; with a checkpoint, also what each rank holds of it.

    Raises KeyError for a model that isn't in the space, and what `expected_ranks` raises.
    """
    model = space.model(cell.model)
    violations = decide(model.shape, cell)
    shape = model.shape
    experts = f", {shape.num_experts} experts in layers {list(shape.moe_layers)}" if shape.moe_layers else ""
    tiers = [name for name in space.tiers if cell in cells(space, name)]
    facts = [
        ("model", f"{model.architecture}, {model.dtype}, {shape.num_hidden_layers} layers{experts}"),
        ("layout", f"{cell.layout.short}, {cell.layout.world_size} rank{'s' if cell.layout.world_size > 1 else ''}"),
        ("mode", f"{cell.mode}: {MODE_MEANINGS.get(cell.mode, 'unknown')}"),
        ("transport", cell.transport),
        ("class", cell.class_name),
        ("tiers", ", ".join(tiers) or "none"),
        ("legal", "no" if violations else "yes"),
    ]
    parts = [cell.id + "\n" + "\n".join(f"  {name:<11}{value}" for name, value in facts), _rules(violations)]
    if not violations:
        parts.append(_commands(cell, tiers))
        if checkpoint is not None:
            parts += [_rank(expectation) for expectation in expected_ranks(checkpoint, cell.layout)]
    return "\n\n".join(parts) + "\n"


def command_lines(cell: Cell, model_path: str) -> list[list[str]]:
    """Return the reference's command lines for a cell: the daemon's where the mode needs one beforehand, then the engine's."""
    layout = ["--model-path", model_path, *cell.layout.arguments()]
    transport = [] if cell.mode == "off" else ["--weight-cache-transport", cell.transport]
    daemon = ["python", "-m", "reference.daemon", *layout, *transport]
    engine = ["python", "-m", "reference.engine", *layout, "--weight-cache-mode", cell.mode, *transport]
    return [daemon, engine] if cell.mode == "client" else [engine]


def _rules(violations: Sequence[Violation]) -> str:
    broken = {violation.rule.id: violation.reason for violation in violations}
    lines = [f"  {'no ' if rule.id in broken else 'yes'} {rule.id:<20} {rule.sentence}" for rule in RULES]
    lines += [f"  refused by {name}: {reason}" for name, reason in broken.items()]
    return "Rules:\n" + "\n".join(lines)


def _commands(cell: Cell, tiers: Sequence[str]) -> str:
    lines = [f'MODEL="$(python -m conformance.checkpoints {cell.model} | cut -f 2)"']
    lines += [" ".join(command) for command in command_lines(cell, '"$MODEL"')]
    by_hand = "Run it by hand, each in a shell of its own:" if len(lines) > 2 else "Run it by hand:"
    text = by_hand + "\n" + "\n".join(f"  {line}" for line in lines)
    tier = f" --tier {tiers[0]}" if tiers else ""
    return f"{text}\n\nRun its tests:\n  pytest conformance/test_cells.py::{cell.class_name}{tier}"


def _rank(expectation: RankExpectation) -> str:
    total = sum(tensor.nbytes for tensor in expectation.tensors)
    title = (
        f"Rank {expectation.rank}: {len(expectation.tensors)} tensors, {total:,} bytes\n"
        f"  layout hash  {expectation.layout_hash}\n"
        f"  checkpoint   {expectation.checkpoint}\n"
        f"  key          {expectation.key(1)} (for post-processing version 1)\n"
    )
    names = ("tensor", "dtype", "shape", "bytes", "made of")
    rows = [
        (tensor.name, tensor.dtype, "x".join(map(str, tensor.shape)), f"{tensor.nbytes:,}", _made_of(tensor))
        for tensor in expectation.tensors
    ]
    return f"{title}\n{render_table(names, rows)}".rstrip()


def _made_of(tensor: ManifestTensor) -> str:
    if tensor.alias:
        return f"alias of {tensor.alias}"
    if not tensor.sources:
        return str(tensor.transform["op"])
    said = " ".join(map(_part, tensor.sources[:3]))
    said += f" ... {len(tensor.sources)} parts" if len(tensor.sources) > 3 else ""
    return said if tensor.transform["op"] == "copy" else f"{said}, cast from {tensor.transform['from']}"


def _part(source: Source) -> str:
    """Return `experts.3.up_proj[0:16,0:64]`: the tensor's name within its layer's block, and the box."""
    found = re.search(r"(experts\.\d+\.\w+|\w+)$", source.tensor.removesuffix(".weight"))
    name = found[0] if found else source.tensor
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in zip(source.start, source.stop, strict=True))}]"
