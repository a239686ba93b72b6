"""A checkpoint's tokenizer: `tokenizer.json`, its chat template, and the tokens that end a sequence."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reference.engine.messages import RequestRefusal
from reference.errors import CheckpointRefusal

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Made by `load`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, template: jinja2.Template | None, special: dict[str, str]
    ) -> None:
        self._backend = backend
        self._template = template
        self._special = special
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, model_path: str | Path) -> Tokenizer:
        """Read a checkpoint directory's tokenizer. Raises `CheckpointRefusal` for a file that is missing or torn."""
        path = Path(model_path)
        config = _read_json(path / "tokenizer_config.json") or {}
        special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
        return cls(_read_backend(path), _read_template(path, config), special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, framed with special tokens where the tokenizer does so by default."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token: int) -> str:
        """Return the text of one token id, special tokens included. Remembered, since log-probabilities ask for many."""
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self.decode([token], skip_special_tokens=False)
        return text

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Return the prompt that asks for an assistant's next message. `variables` are for the template.

        Raises `RequestRefusal` where there is no template, or it declines the messages.
        """
        if self._template is None:
            raise RequestRefusal("messages: the checkpoint has no chat template; use /v1/completions", param="messages")
        given = {"tools": None, "documents": None, **self._special, **variables}
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **given)
        # A template is the checkpoint's code: whatever it stumbles over is said to come from these messages.
        except Exception as error:
            raise RequestRefusal(f"messages: the chat template declines them: {error}", param="messages") from error
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)


def eos_token_ids(model_path: str | Path) -> tuple[int, ...]:
    """Return the ids that end a sequence, ascending: all that generation_config.json, config.json and the tokenizer name.

    Raises `CheckpointRefusal` for a file that is torn.
    """
    path = Path(model_path)
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        named = (_read_json(path / name) or {}).get("eos_token_id")
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    text = _token_text((_read_json(path / "tokenizer_config.json") or {}).get("eos_token"))
    token = _read_backend(path).token_to_id(text) if text is not None else None
    return tuple(sorted(ids if token is None else ids | {token}))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointRefusal(f"{path}: can't be read as JSON: {error}") from error
    if not isinstance(read, dict):
        raise CheckpointRefusal(f"{path}: holds a JSON {type(read).__name__}, an object is needed")
    return read


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointRefusal(f"{file}: missing; the fast tokenizer's file is needed")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    # The library raises bare Exception for whatever is wrong with the file.
    except Exception as error:
        raise CheckpointRefusal(f"{file}: can't be read as a tokenizer: {error}") from error


def _token_text(value: Any) -> str | None:
    """A special token of tokenizer_config.json is a text, or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _read_template(path: Path, config: dict[str, Any]) -> jinja2.Template | None:
    file = path / "chat_template.jinja"
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    if source is None:
        return None
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointRefusal(f"{path}: the chat template can't be compiled: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates are written for: that of transformers' `apply_chat_template`."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
