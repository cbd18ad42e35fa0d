"""The table of `pdserve generate --logprobs`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pdserve.client.generation import Token


def logprobs_table(tokens: Sequence[Token]) -> Table:
    """One row per token: its logprob and probability, and the likeliest tokens at its place."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("token", "id", "logprob", "p"):
        table.add_column(name, justify="left" if name == "token" else "right")
    table.add_column("likeliest by the model itself")
    for token in tokens:
        if token.logprob is None:
            continue
        likeliest = (f"{_shown(top.text, top.token_id)} {math.exp(top.logprob):.1%}" for top in token.top_logprobs)
        table.add_row(
            Text(_shown(token.text, token.token_id)),
            str(token.token_id),
            f"{token.logprob:.3f}",
            f"{math.exp(token.logprob):.1%}",
            Text("  ".join(likeliest)),
        )
    return table


def _shown(text: str, token_id: int) -> str:
    """Text with its spaces and line ends visible; a token without text by its id."""
    return json.dumps(text, ensure_ascii=False) if text else f"#{token_id}"
