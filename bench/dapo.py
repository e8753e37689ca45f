"""DAPO without and with ARRoL: as `bench.accuracy` (Table 2).

python -m bench.dapo
"""

from __future__ import annotations

from bench.accuracy import main

if __name__ == "__main__":
    main(__doc__, "dapo", ("DAPO", "DAPO + ARRoL"), range(3))
