"""What a checkpoint is made from, and the key under which it is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).parent
#: The files whose bytes decide what the maker makes. Part of each key, so that a changed maker never serves an old file.
MAKER_SOURCES = ("make.py", "weights.py", "prompts.py", "tokenizer.py", "corpus.txt", "chat_template.jinja")


class Model(Protocol):
    """The fields of a model of `matrix/space.toml` that a checkpoint is made from."""

    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def max_shard_size(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Recipe:
    """All that decides a checkpoint's bytes.

    `architecture` is a Hugging Face class name (`Qwen3ForCausalLM`), `config` the fields given to its configuration
    class, `dtype` how the weights are stored (`float32`, `bfloat16`, `float16`), `max_shard_size` what
    `save_pretrained` takes (`200KB`).
    """

    name: str
    architecture: str
    seed: int
    dtype: str
    max_shard_size: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, model: Model) -> Recipe:
        return cls(
            name=model.name,
            architecture=model.architecture,
            seed=model.seed,
            dtype=model.dtype,
            max_shard_size=model.max_shard_size,
            config=dict(model.config),
        )

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the recipe as canonical JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__} | {"config": dict(self.config)}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @property
    def key(self) -> str:
        """A hash of the recipe and of the maker: `<name>-<16 hex digits>`, fit for a file name."""
        digest = hashlib.blake2b(self.to_json().encode(), digest_size=8)
        for source in MAKER_SOURCES:
            digest.update((HERE / source).read_bytes())
        return f"{self.name}-{digest.hexdigest()}"
