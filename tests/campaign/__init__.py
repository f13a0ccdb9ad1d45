"""A campaign against vattn: random operations, failures, interrupts, arguments, forks and threads on the public
interface, against a model of the contents that knows of no page, block or slot. docs/campaign.md has the whole.

    python -m tests.campaign --minutes 10 --seed 1
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("VATTN_CHECK", "1")  # engines check themselves whenever they become idle
# The driver table whose calls can fail is the test-suite's.
sys.path.append(str(Path(__file__).parents[1] / "support"))
