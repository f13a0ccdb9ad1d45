"""Packages that only some commands need."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from vattn.errors import ConfigError


def require_server_extra(command: str) -> None:
    """Raise a ConfigError if a package of the `server` extra is missing."""
    missing = []
    for text in metadata.requires("vattn") or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            continue
        if wanted.marker.evaluate({"extra": "server"}):
            try:
                metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                missing.append(wanted.name)
    if missing:
        raise ConfigError(f"{command} needs {', '.join(missing)}: pip install 'vattn[server]'")
