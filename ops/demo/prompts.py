"""The demo's prompts: texts of very different lengths from the Python standard library."""

from __future__ import annotations

import argparse
import bisect
import heapq
import inspect
import json.decoder
import statistics
import string
import textwrap
from collections.abc import Callable, Sequence

MARGIN = 0.85  # share of the context; characters per token vary between texts


_SOURCES: Sequence[tuple[str, int, Callable[[], str]]] = (
    ("a few words", 4, lambda: "def main("),
    (
        "a sentence",
        24,
        lambda: "The following example shows how to open a file, read its lines and close it again:\n\n",
    ),
    ("string", 70, lambda: inspect.getsource(string.capwords)),
    ("bisect", 160, lambda: inspect.getsource(bisect)),
    ("statistics", 320, lambda: inspect.getdoc(statistics) or ""),
    ("heapq", 640, lambda: inspect.getsource(heapq)),
    ("textwrap", 1000, lambda: inspect.getsource(textwrap)),
    ("argparse", 1500, lambda: inspect.getsource(argparse)),
)

CALIBRATION = inspect.getsource(json.decoder)[:600]


def demo_prompts(chars_per_token: float, context_length: int, max_tokens: int) -> dict[str, str]:
    """Eight prompts, by the names of their sources, from a few tokens to about 1500 (fewer in a shorter context), cut
    at the end of a line if possible."""
    longest = max(8, int((context_length - max_tokens) * MARGIN))
    return {
        name: _cut(source(), max(4, int(min(tokens, longest) * chars_per_token))) for name, tokens, source in _SOURCES
    }


def _cut(text: str, chars: int) -> str:
    if len(text) <= chars:
        return text
    head = text[:chars]
    whole_lines = head.rpartition("\n")[0]
    return whole_lines + "\n" if len(whole_lines) > 0.8 * chars else head
