"""Quantiles of a few numbers, and their robust spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

#: The median absolute deviation times this is the standard deviation, for normal noise.
MAD_TO_SIGMA = 1.4826


def quantile(values: Sequence[float], part: float) -> float:
    """Return a quantile (`part` 0 to 1) with linear interpolation: `statistics.quantiles(method="inclusive")`, as SGLang's.

    Raises ValueError where there are no values.
    """
    if not values:
        raise ValueError("a quantile of no values")
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def robust_sigma(deviations: Sequence[float]) -> float:
    """Return the standard deviation that the median of absolute deviations stands for; strays don't move it."""
    return MAD_TO_SIGMA * statistics.median(abs(one) for one in deviations) if deviations else 0.0
