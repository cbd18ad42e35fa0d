"""Finds stop strings in text that arrives in pieces, and holds back what may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The first stop string to be complete ends the text (of several that are complete at the same character, the
    longest): so the result does not depend on where the pieces were cut.

    One Knuth-Morris-Pratt automaton per string: the cost per character does not grow with the strings' length.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.hit: str | None = None
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """What may be shown now. After a `hit` nothing more comes."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        for position in range(len(self._held), len(text)):
            for index, stop in enumerate(self._stops):
                if self._advance(index, text[position]) == len(stop):
                    self.hit, self._held = stop, ""
                    return text[: position + 1 - len(stop)]
        keep = max(self._matched)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text has ended: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, index: int, character: str) -> int:
        stop, fallback, matched = self._stops[index], self._fallbacks[index], self._matched[index]
        while matched and stop[matched] != character:
            matched = fallback[matched - 1]
        if stop[matched] == character:
            matched += 1
        self._matched[index] = matched
        return matched


def _fallback(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = table[matched - 1]
        if stop[i] == stop[matched]:
            matched += 1
        table[i] = matched
    return table
