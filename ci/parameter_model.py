"""A guess for classes that never ran: least squares over their parameters, fitted on the classes that have readings.

Logarithms of seconds are fitted, so that a parameter multiplies the time and the error is relative. The error shown is
that of each class predicted from all the others (leave-one-out): what a class that has never been seen can expect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ci.policy import DEFAULT_POLICY, Policy
from ci.quantile import quantile
from matrix.cell import Cell
from matrix.model_shape import ModelShape
from matrix.space import Model

#: Values by parameter name, the most telling first: a fit on few classes takes only the first ones.
Parameters = Mapping[str, float]
#: Seconds below which a stage's time is noise; it keeps the logarithm of a stage that takes none.
LEAST_SECONDS = 0.01


@dataclass(frozen=True)
class Fit:
    """A fitted model: the intercept, then a coefficient for each of `names`.

    `seen`: the least and the largest value of each parameter, used or not, among the classes it was fitted on.
    `classes`: how many it was fitted on. `median_error`, `worst_error`: relative, leave-one-out. `upper`: the factor
    that three in four actual times stay below, `worst`: the largest seen (both at least 1).
    """

    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    seen: tuple[tuple[str, float, float], ...]
    classes: int
    median_error: float
    worst_error: float
    upper: float
    worst: float


@dataclass(frozen=True)
class Prediction:
    """`seconds`: the central guess. `outside`: the parameters whose value lies outside what the fit has seen."""

    seconds: float
    outside: tuple[str, ...]


def parameters_of(cell: Cell, model: Model) -> Parameters:
    """Return what a class's time may depend on: mode, layout, model size, experts, dtype, transport.

    Sizes are base-2 logarithms. An axis that is added to `Layout` (pipeline stages, expert parallelism) is one at once.
    """
    shape = model.shape
    found = {f"mode={cell.mode}": 1.0}
    for axis in fields(cell.layout):
        value = getattr(cell.layout, axis.name)
        if isinstance(value, bool):
            found[axis.name] = float(value)
        elif isinstance(value, int):
            found[axis.name] = math.log2(1 + value)
        elif value is not None:
            found[f"{axis.name}={value}"] = 1.0
    found["size"] = math.log2(parameter_count(shape))
    found["experts"] = math.log2(1 + shape.num_experts)
    found[f"dtype={model.dtype}"] = 1.0
    found[f"transport={cell.transport}"] = 1.0
    return found


def parameter_count(shape: ModelShape) -> int:
    """Return a model's number of weights, norms left out: embeddings, attention, feed-forward parts of all layers."""
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    heads = 2 * shape.num_attention_heads + 2 * shape.num_key_value_heads
    attention = shape.num_hidden_layers * shape.hidden_size * shape.head_dim * heads
    dense = len(shape.dense_layers) * 3 * shape.hidden_size * shape.intermediate_size
    experts = len(shape.moe_layers) * shape.num_experts * 3 * shape.hidden_size * shape.moe_intermediate_size
    return embeddings + attention + dense + experts


def fit(points: Sequence[tuple[Parameters, float]], policy: Policy = DEFAULT_POLICY) -> Fit | None:
    """Fit seconds by parameters; None with fewer than `policy.model_min_classes` classes.

    A parameter that doesn't vary, or that follows from those before it, is left out; so are the last ones where there
    would be fewer than two classes for each.
    """
    count = len(points)
    if count < policy.model_min_classes:
        return None
    candidates = list(dict.fromkeys(name for parameters, _ in points for name in parameters))
    candidates.sort(key=_priority)
    logs = np.log([max(seconds, LEAST_SECONDS) for _, seconds in points])
    values = {name: np.array([parameters.get(name, 0.0) for parameters, _ in points]) for name in candidates}
    columns = [np.ones(count)]
    names: list[str] = []
    for name, column in values.items():
        trial = np.column_stack([*columns, column])
        if len(names) < count // 2 - 1 and np.linalg.matrix_rank(trial) == trial.shape[1]:
            columns.append(column)
            names.append(name)
    matrix = np.column_stack(columns)
    solution, *_ = np.linalg.lstsq(matrix, logs, rcond=None)
    # What a class's own reading pulled the fit towards itself by: the diagonal of the hat matrix.
    pull = np.clip(np.sum(matrix * np.linalg.pinv(matrix).T, axis=1), 0.0, 0.99)
    rests = [float(one) for one in (logs - matrix @ solution) / (1 - pull)]
    errors = [abs(math.expm1(-rest)) for rest in rests]
    return Fit(
        names=tuple(names),
        coefficients=tuple(map(float, solution)),
        seen=tuple((name, float(column.min()), float(column.max())) for name, column in values.items()),
        classes=count,
        median_error=statistics.median(errors),
        worst_error=max(errors),
        upper=math.exp(max(0.0, quantile(rests, policy.est_percentile))),
        worst=math.exp(max(0.0, *rests)),
    )


def predict(model: Fit, parameters: Parameters) -> Prediction:
    """Return what a fit says of a class with these parameters."""
    intercept, *slopes = model.coefficients
    terms = (slope * parameters.get(name, 0.0) for name, slope in zip(model.names, slopes, strict=True))
    seen = {name: (least, largest) for name, least, largest in model.seen}
    outside = [
        name
        for name in dict.fromkeys((*parameters, *seen))
        if not (limits := seen.get(name, (0.0, 0.0)))[0] <= parameters.get(name, 0.0) <= limits[1]
    ]
    return Prediction(math.exp(intercept + sum(terms)), tuple(outside))


def _priority(name: str) -> int:
    order = ("mode=", "tp", "pp", "size", "experts", "dtype=")
    return next((place for place, start in enumerate(order) if name.startswith(start)), len(order))
