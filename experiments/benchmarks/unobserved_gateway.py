"""`python -m experiments.benchmarks.unobserved_gateway …`: the gateway without metrics, live view and traces of requests, for
measuring what these cost."""

from __future__ import annotations

from typing import Any

import gateway.gateway_thread
from gateway.__main__ import main
from gateway.gateway import Gateway


class UnobservedGateway(Gateway):
    """A gateway whose requests nobody is told of."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._inference._observers = ()


if __name__ == "__main__":
    setattr(gateway.gateway_thread, "Gateway", UnobservedGateway)  # noqa: B010 - an imported name
    main()
