"""A failing scenario as a script of its own, which needs the library alone."""

from __future__ import annotations

import inspect

from tests.campaign import contents, injection
from tests.campaign.play import Played


def script(played: Played) -> str:
    """Python that shows what was found; to be run from the project's root."""
    lines = "\n".join(played.lines)
    used = [contents, *([injection] if "interrupted(" in lines else [])]
    parts = [f'"""{_plain(played.detail)}"""']
    if "FaultyTable" in lines:
        parts.append("import sys\n\nsys.path.append('.')\nfrom tests.support.faults import FaultyTable")
    parts += [inspect.getsource(module).replace("from __future__ import annotations\n", "") for module in used]
    if "Index" in lines:
        from tests.campaign import fuzz

        parts.append(inspect.getsource(fuzz.Index) + "\n\n" + inspect.getsource(fuzz.BadIndex))
    parts.append(f"import vattn\n\n{lines}\n{played.code}")
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''").strip('"')
