"""Least squares of relative errors: every measured time counts the same, however long it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fitted(features: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The coefficients with which the sums of ``features`` (a row per value) come closest to ``values``."""
    measured = np.asarray(values, float)
    solved, *_ = np.linalg.lstsq(np.asarray(features, float) / measured[:, None], np.ones(measured.size), rcond=None)
    return [float(each) for each in solved]
