"""Every threshold by which an estimate is made, each with its reason. Change one here, and `ci.simulate` shows what it costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """The thresholds of calibration. Seconds are seconds, fractions are of 1, counts are readings unless said otherwise."""

    window: int = 15
    """Newest usable readings that count. SGLang and miles keep 15 or 16: enough for a 90th percentile, recent enough."""

    min_readings: int = 3
    """With fewer, a number that is there stays; where there is none, the little that is known is used, much widened."""

    below_min_widening: float = 0.5
    """With n < `min_readings` readings the estimate is their largest, times 1 + this / n: 1.5 for one, 1.25 for two."""

    enough_readings: int = 5
    few_widening: float = 0.15
    """With n < `enough_readings` the estimate is the percentile, times 1 + `few_widening` / n: +5 % for three. A
    percentile of so few readings is near their largest, which a later run passes often by about this much."""

    est_percentile: float = 0.75
    """For `est_time`. In simulation it packs as well as the median and halves the runs of over twice their estimate."""

    timeout_percentile: float = 0.90
    timeout_factor: float = 3.0
    """A time-out is to end a hang, not a slow run: three times what nine in ten runs stay below."""

    timeout_margin: float = 1.5
    """A time-out also covers this many times the slowest passing run that was kept apart (cold caches, busy machine)."""

    timeout_classes: tuple[int, ...] = (60, 300, 900, 1800, 3600, 7200)
    """Seconds that a time-out is rounded up to, whole hours above; Bazel's (60, 300, 900, 3600) with steps where its are
    wide, since GPUs idle while a hang lasts. Few values make few diffs, and none between two near-equal classes."""

    timeout_lower: float = 0.8
    """A time-out goes down only where the need is below this part of the lower value, so that it does not flap."""

    change_fraction: float = 0.10
    change_seconds: float = 1.0
    change_spread: float = 0.5
    """An estimate is rewritten only if it moves by more than the largest of: this fraction of itself, these seconds,
    and this many interquartile ranges. The 75th percentile of 15 noisy readings moves by about a quarter of that range
    by chance alone, so about two standard deviations make no diff."""

    refresh_days: int = 30
    """A kept estimate's statistics are renewed when they are this many days behind, so that nightly runs make no diffs."""

    shift_readings: int = 3
    """A new level needs this many readings: one or two strays do not look like one."""

    shift_fraction: float = 0.20
    shift_sigmas: float = 4.5
    """Levels differ if their medians do by this fraction and by this many standard errors of the difference."""

    shift_share: float = 0.8
    """The part of each level's readings that must lie on its own side of the middle: two alternating times are no shift."""

    sudden_readings: int = 2
    sudden_fraction: float = 0.5
    """A rise above this fraction is believed of two readings of different runs that agree: until it is, each run of
    the class breaks its shard's limit. A fall can wait for the third."""

    noise_floor: float = 0.05
    """The least relative noise that is assumed. Three readings that agree by luck do not make a fourth a change."""

    outlier_fraction: float = 0.5
    outlier_sigmas: float = 4.0
    outlier_share: float = 0.2
    """A stray is further from its level's median than this fraction and these robust deviations; if more than this
    share are, they are how the class behaves, and count."""

    busy_load: float = 1.5
    """Load (1-minute average a core) above the median of the readings at which a machine was busy with something else."""

    clock_tolerance: float = 60.0
    """Seconds that a reading may lie in the future, or before its run's header: clocks of a fleet differ a little."""

    stale_days: int = 45
    """`--check` calls an estimate stale if the newest reading that it could be made from is this many days old."""

    off_fraction: float = 0.25
    off_seconds: float = 2.0
    """`--check` fails if an estimate is off by more than the larger. Wider than a rewrite, so that the nightly job has
    time to follow before changes of others are held up."""

    forget_days: int = 90
    """A class that is no more in the suite and has no reading for so many days is dropped."""

    model_min_classes: int = 6
    """Classes with readings on a machine kind below which nothing is predicted for the others."""

    model_change_fraction: float = 0.25
    """A predicted number is rewritten only if it moves by more than this: each new reading of any class moves the fit."""

    model_outside_widening: float = 1.5
    """A prediction outside what the fit has seen (more ranks, another mode) is multiplied by this: its error is unknown."""


DEFAULT_POLICY = Policy()
