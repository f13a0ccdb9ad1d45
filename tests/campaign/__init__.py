"""A campaign against vattn: random operations, failures, interrupts, arguments, forks and threads on the public
interface, against a model of the contents that knows of no page, block or slot. docs/campaign.md has the whole.

    python -m tests.campaign --minutes 10 --seed 1
"""

import sys
from pathlib import Path

# The driver table whose calls can fail is the test-suite's.
sys.path.append(str(Path(__file__).parents[1] / "support"))
