"""The cells of `matrix/space.toml`, one generated class each. `--tier` chooses among them, `-m 2gpu` by world size."""

from conformance.classes import make_classes
from matrix.generate import cells
from matrix.space import load_space

_space = load_space()
globals().update(make_classes(cells(_space), _space, __name__))
