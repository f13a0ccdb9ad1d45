"""What is in inner/ runs over the stub only, in the processes that test_over_stub.py starts."""

from __future__ import annotations

import os

import stub_cuda

collect_ignore_glob = [] if stub_cuda.ACTIVE in os.environ else ["inner/*"]
