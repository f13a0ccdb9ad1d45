"""Libraries in build/ in the place of packages that are not installed: machines with a GPU may have no network."""

from __future__ import annotations

import lzma
import os
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor


def put(package: str, library: Path, made_by: str, function: Callable[..., Tensor]) -> str | None:
    """Makes `package` of one function over the operators of a library, unless there is such a package already.

    Args:
        library: or the same name with ".xz", which is unpacked beside it.
        made_by: a clause, how to get it.

    Returns:
        Why there is no such package afterwards, as a clause; None if there is.
    """
    if find_spec(package) is not None:
        return None
    packed = library.with_name(f"{library.name}.xz")
    if not library.exists() and packed.exists():
        part = library.with_name(f"{library.name}.{os.getpid()}")  # several processes may come here at once
        try:
            with lzma.open(packed) as source, part.open("wb") as target:
                shutil.copyfileobj(source, target)
            part.replace(library)
        except (OSError, EOFError, lzma.LZMAError) as error:
            part.unlink(missing_ok=True)
            return f"{packed.name} cannot be unpacked: {error}"
    if not library.exists():
        return f"there is no {library.name} either ({made_by})"
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"{library.name} does not load: {error}"
    module = ModuleType(package, f"{library.name}, for the tests and benchmarks of vattn")
    module.__spec__ = ModuleSpec(package, None, origin=str(library))
    vars(module)[function.__name__] = function
    sys.modules[package] = module
    return None
