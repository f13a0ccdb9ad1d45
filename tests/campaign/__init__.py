"""A campaign against vattn: random operations, failures, interrupts, arguments, forks and threads on the public
interface, against a model of the contents that knows of no page, block or slot. docs/campaign.md has the whole.

    python -m tests.campaign --minutes 10 --seed 1
"""

import os

os.environ.setdefault("VATTN_CHECK", "1")  # engines check themselves whenever they become idle
