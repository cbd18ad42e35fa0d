"""A request that waits for workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.prompt import Prompt
from router.registry import Assignment
from router.view import Needs


@dataclass(slots=True, order=True)
class Waiting:
    """A request in the line.

    ``order``: its position among the requests of its client; a retry keeps it.
    ``client``, ``priority``: whose turn it takes, and how early it is served (lower values first). ``holder``: whose
    share of the queue it takes.
    ``prompt``: its tokens, if prefix caches matter.
    ``patient``: it was placed before. It is not refused because the queue is full, and waits for a missing worker until
    its deadline, others for ``router.patience_s``, if that is set.
    ``retry``: its worker has failed it. It comes before other requests of its priority, and does not count again.
    ``since_s``: when it joined the line, on the router's clock.
    """

    order: int
    needs: Needs = field(compare=False)
    client: str = field(compare=False, default="")
    holder: str = field(compare=False, default="")
    priority: int = field(compare=False, default=0)
    patient: bool = field(compare=False, default=False)
    retry: bool = field(compare=False, default=False)
    prompt: Prompt | None = field(compare=False, default=None)
    since_s: float = field(compare=False, default=0.0)
    placed: asyncio.Future[Assignment] = field(compare=False, default_factory=asyncio.Future)

    @property
    def tokens(self) -> int:
        """What it counts for: the tokens of its prompt, and those it may generate."""
        return self.needs.tokens
