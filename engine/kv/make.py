"""The choice of a backend.

A backend is one file in this package: a class with the members of `KVBackend` that `register` decorates. Every module
of the package is imported here, so nothing else names it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, get_args

from vattn.errors import ConfigError
from vattn.integers import shown
from vattn.quantised import KVCacheDtype

from .. import kv as package
from ..checks import checked_choice
from .base import REGISTERED, KVBackend
from .spec import KVSpec

for _module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    importlib.import_module(_module.name)

# The names of the backends, the library's own first.
BACKENDS = tuple(sorted({name for name, _, _ in REGISTERED}, key=lambda name: (name != "virtual", name)))


def find_backend(
    kv: str, kv_cache_dtype: KVCacheDtype = "auto", kv_options: Mapping[str, Any] | None = None
) -> type[KVBackend]:
    """The backend `kv` that stores `kv_cache_dtype`: "auto", the model's type, or "int8", quantised.

    Args:
        kv_options: options of the backend; one that is a backend's switch chooses it.

    Raises:
        ConfigError: an unknown name, a type that this backend does not store, or a switch that is no bool.
    """
    if not isinstance(kv, str) or kv not in BACKENDS:
        raise ConfigError(f"kv={shown(kv)} is not a backend; choose one of {', '.join(BACKENDS)}")
    checked_choice("kv_cache_dtype", kv_cache_dtype, get_args(KVCacheDtype))
    switches = [switch for name, dtype, switch in REGISTERED if switch and (name, dtype) == (kv, kv_cache_dtype)]
    given = {switch: kv_options[switch] for switch in switches if kv_options and switch in kv_options}
    for switch, value in given.items():
        if not isinstance(value, bool):
            raise ConfigError(f"the option {switch} of kv={kv!r} is {shown(value)}; give True or False")
    chosen = next((switch for switch, value in given.items() if value), None)
    found = REGISTERED.get((kv, kv_cache_dtype, chosen))
    if found is None:
        others = " or ".join(f"kv={name!r}" for name, dtype, _ in REGISTERED if dtype == kv_cache_dtype)
        raise ConfigError(f"kv={kv!r} stores keys and values in the model's type only; use {others} for int8")
    return found


def make_backend(kv: str, spec: KVSpec, *, kv_cache_dtype: KVCacheDtype = "auto") -> KVBackend:
    """The backend called `kv`: as many units as the budget holds, and no more than can be used.

    Raises:
        ConfigError: an unknown name, options that it does not have, or a budget below one unit.
    """
    return find_backend(kv, kv_cache_dtype, spec.kv_options).from_spec(spec)
