"""`python -m conformance.checkpoints [NAME ...] [--dir DIRECTORY]`: make the checkpoints and print where they are."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conformance.checkpoints import MakerFailed, Recipe, default_directory, ensure_all
from matrix.space import load_space


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.checkpoints", description="Make the suite's checkpoints."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="models of matrix/space.toml (default: all)")
    parser.add_argument("--dir", type=Path, default=None, help=f"where to keep them (default: {default_directory()})")
    arguments = parser.parse_args()
    recipes = {model.name: Recipe.of(model) for model in load_space().models}
    if unknown := [name for name in arguments.names if name not in recipes]:
        print(f"no such model: {', '.join(unknown)}; there are {', '.join(recipes)}", file=sys.stderr)
        return 2
    wanted = [recipes[name] for name in arguments.names or recipes]
    try:
        for checkpoint in ensure_all(wanted, arguments.dir):
            print(checkpoint.recipe.name, checkpoint.path, sep="\t")
    except MakerFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
