"""Chance as a dependency: product code draws from a `random.Random` that it is given. A service draws from the system;
a simulated one from a seed, so that the same seed gives the same run."""

from __future__ import annotations

import random

SYSTEM = random.SystemRandom()
"""The operating system's source, as in `secrets`."""
