"""The text of one output: detokenized, searched for stop strings, with the tokens it consists of."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.tokenizer import Detokenizer


class StopStrings:
    """Finds stop strings in text that arrives in pieces. The first stop string that is complete ends the text; of
    several that are complete at the same character, the longest. The result does not depend on how the text is divided.

    Each string resumes from the prefix of it that the text ended with, so the cost of a piece does not grow with the
    length of the strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.hit: str | None = None
        self._begun = dict.fromkeys(stops, 0)
        """Of each stop string, how many of its characters the text ends with."""
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that may be shown now. Empty after a `hit`."""
        if self.hit is not None:
            return ""
        if not self._begun:
            return text
        before = len(self._held)
        text = self._held + text
        end = len(text) + 1
        for stop, begun in self._begun.items():
            found = text.find(stop, before - begun)
            if found >= 0 and (found + len(stop), -len(stop)) < (end, -len(self.hit or "")):
                self.hit, end = stop, found + len(stop)
        if self.hit is not None:
            self._held = ""
            return text[: end - len(self.hit)]
        for stop, begun in self._begun.items():
            count = min(begun + len(text) - before, len(stop) - 1)
            while not text.endswith(stop[:count]):
                count -= 1
            self._begun[stop] = count
        keep = max(self._begun.values())
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back as a possible stop string, at the end of the text."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """Gives the text that each token releases. Without a detokenizer there is no text."""

    def __init__(self, detokenizer: Detokenizer | None, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._token_ids: list[int] = []
        self._starts: list[int] = []  # number of characters before each token
        self._num_characters = 0
        self._shown: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.hit is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.hit

    @property
    def text(self) -> str:
        """All text that was shown."""
        return "".join(self._shown)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of `text`; after a stop string, only those that begin before it. Always a prefix of the added
        tokens, so that per-token data such as log-probabilities stays aligned."""
        if not self.stopped:
            return self._token_ids
        end = sum(map(len, self._shown))
        return [token_id for token_id, start in zip(self._token_ids, self._starts, strict=True) if start < end]

    @property
    def last_start(self) -> int:
        """Number of characters before the last token's."""
        return self._starts[-1]

    def add(self, token_id: int) -> str:
        """The text to show with this token."""
        self._token_ids.append(token_id)
        self._starts.append(self._num_characters)
        if self._detokenizer is None:
            return ""
        return self._show(self._detokenizer.add(token_id))

    def end(self) -> str:
        """The text that was held back until the last token."""
        if self._detokenizer is None:
            return ""
        shown = self._show(self._detokenizer.flush())
        held = self._stops.flush()
        self._shown.append(held)
        return shown + held

    def _show(self, text: str) -> str:
        self._num_characters += len(text)
        shown = self._stops.feed(text)
        if shown:
            self._shown.append(shown)
        return shown
