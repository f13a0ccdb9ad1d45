"""What the plugin cannot serve is said when the engine starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("plugin", "llm", "match"),
    [
        ({"page": 1}, {}, "there is no option 'page'; there are kernel, page_size"),
        ({"keep_free": 2}, {}, "keep_free=2 is a share of the blocks"),
        ({"kernel": "flash_attn"}, {}, "flash_attn"),
        ({"kernel": "warp"}, {}, "warp"),
        ({"page_size": 2**21}, {}, "not a whole number of pages of 2.0 MiB; use a block_size that is a multiple of"),
        ({"layout": "layered"}, {"block_size": 4}, "not a whole number of pages of 4.0 KiB.*or layout='fused'"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        ({"layout": "layered"}, {"block_size": 8}, "larger or fewer blocks, layout='fused'"),
    ],
)
def test_refused_when_it_starts(
    plugin: dict[str, Any], llm: dict[str, Any], match: str, run: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)ConfigError: .*{match}"):
        run(plugin=plugin, llm=llm)
