"""Writes the suite as folders."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from suite import CASES, write  # noqa: E402 (the folder of the suite is known only now)

out = Path(sys.argv[1])
print(f"wrote {len(write(out, CASES))} jobs")
for family in sorted({case.family for case in CASES}):
    print(f"metatrainer job validate {out}/{family}/*/* --family {family}")
