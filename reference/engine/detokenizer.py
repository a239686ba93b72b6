"""Text out of a growing sequence of tokens: whole characters only, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from reference.engine.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text as they come. What `push` and `finish` return, joined, is the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The tokens of the last piece, as the left context of the next, and those that have not been given out.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain; it is empty while the last character lacks bytes."""
        self._held += ids
        text = self._text()
        if text.endswith("\ufffd"):
            return ""
        # Tokens without text (special ones) are no context: what follows them would look like the start of a text.
        self._context = self._held if text else self._context + self._held
        self._held = []
        return text

    def finish(self) -> str:
        """Return what was held back, complete or not."""
        text, self._held = self._text(), []
        return text

    def _text(self) -> str:
        # A token's text can depend on what stands before it (a leading space, a byte that completes a character).
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._held])[len(before) :]


class StopStrings:
    """Cuts a stream of text before the first stop string, which may come in several pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that can't be part of a stop string any more, and the stop string once one is there.

        Of several the one that is complete first counts; the longest of those. After a match there is no more text.
        """
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._strings if (start := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return text[:start], stop
        kept = max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def finish(self) -> str:
        """Return what was held back as the possible start of a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
