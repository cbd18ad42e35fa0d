"""The first hour on a machine with a GPU: docs/gpu.md says how to run and read it. Needs no Ray.

python scripts/gpu_check.py [--list] [--quick] [--only STEP,STEP] [--from STEP] [--device cpu] [--stop]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.benchmarks.first_hour.run import main

if __name__ == "__main__":
    sys.exit(main())
