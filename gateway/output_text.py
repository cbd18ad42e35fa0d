"""The text of one output: detokenized, searched for stop strings, with the tokens it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopStrings


class OutputText:
    """Feed it tokens; it gives the text each of them releases. Without a detokenizer there is no text at all."""

    def __init__(self, detokenizer: Detokenizer | None, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._token_ids: list[int] = []
        self._starts: list[int] = []  # characters that were there before each token
        self._num_characters = 0
        self._shown: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.hit is not None

    @property
    def text(self) -> str:
        """All that was shown."""
        return "".join(self._shown)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of `text`: after a stop string, those that begin before its place. Always the first ones of all
        that were added, so that what was said of the i-th token (its logprobs) stays the i-th's."""
        if not self.stopped:
            return self._token_ids
        end = sum(map(len, self._shown))
        return [token_id for token_id, start in zip(self._token_ids, self._starts, strict=True) if start < end]

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
