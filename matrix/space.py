"""The parameter space: models, axes and tiers, read from `space.toml`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from matrix.cell import MODEL_NAME, Cell, Layout
from matrix.model_shape import ConfigError, ModelShape

SPACE_FORMAT = 1
DEFAULT_PATH = Path(__file__).parent / "space.toml"


class SpaceError(Exception):
    """A space file that can't be read or contradicts itself; the text names the file and the entry."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A model under test.

    `architecture` is a Hugging Face class name, `config` keyword arguments of its configuration class, `seed` what its
    weights are drawn from, `dtype` how they are stored, `max_shard_size` what `save_pretrained` takes (`200KB`).
    """

    name: str
    architecture: str
    seed: int
    dtype: str
    max_shard_size: str
    config: dict[str, Any]

    @cached_property
    def shape(self) -> ModelShape:
        """The sizes of its tensors. Raises `ConfigError`."""
        return ModelShape.from_config(self.config, f"model {self.name}", self.architecture)


class Axes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values of each axis, in the order in which cells are listed."""

    tp: tuple[int, ...]
    mode: tuple[str, ...]
    transport: tuple[str, ...]


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cells that are run together: a choice of models and of values of each axis; None is all of them."""

    description: str
    models: tuple[str, ...] | None = None
    tp: tuple[int, ...] | None = None
    mode: tuple[str, ...] | None = None
    transport: tuple[str, ...] | None = None


class Space(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that cells are made from."""

    format: int
    axes: Axes
    tiers: dict[str, Tier]
    models: tuple[Model, ...]

    def model(self, name: str) -> Model:
        """Return the model called `name`. Raises KeyError with a line that says which there are."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(f"no model {name!r} in the space; there are {', '.join(model.name for model in self.models)}")

    def tier(self, name: str) -> Tier:
        """Return the tier called `name`. Raises KeyError with a line that says which there are."""
        if name in self.tiers:
            return self.tiers[name]
        raise KeyError(f"no tier {name!r} in the space; there are {', '.join(self.tiers)}")


def load_space(path: str | Path | None = None) -> Space:
    """Return the space of a TOML file (default: this package's `space.toml`). Raises `SpaceError`."""
    path = Path(path) if path is not None else DEFAULT_PATH
    try:
        space = msgspec.toml.decode(path.read_bytes(), type=Space)
    except OSError as error:
        raise SpaceError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpaceError(f"{path}: {error}") from error
    if space.format != SPACE_FORMAT:
        raise SpaceError(f"{path}: format is {space.format}; this version reads {SPACE_FORMAT}")
    names = [model.name for model in space.models]
    classes = [Cell(name, Layout(), "off", "private").class_name for name in names]
    for model, class_name in zip(space.models, classes, strict=True):
        try:
            _ = model.shape
        except ConfigError as error:
            raise SpaceError(f"{path}: {error}") from error
        if not MODEL_NAME.fullmatch(model.name):
            raise SpaceError(f"{path}: model {model.name!r}: a name is lower-case letters, digits, '.' and '-'")
        if classes.count(class_name) > 1:
            raise SpaceError(f"{path}: model {model.name}: another model has the same name, or the same class names")
    for tier_name, tier in space.tiers.items():
        _check_tier(path, tier_name, tier, space.axes, names)
    return space


def _check_tier(path: Path, name: str, tier: Tier, axes: Axes, models: list[str]) -> None:
    """Refuse a tier that names what isn't there: it would select less than it says."""
    allowed: dict[str, tuple[Any, ...]] = {"models": tuple(models), **msgspec.structs.asdict(axes)}
    for axis, values in allowed.items():
        for value in getattr(tier, axis) or ():
            if value not in values:
                raise SpaceError(f"{path}: tier {name}: {axis} {value!r} is not in the space; there are {list(values)}")
