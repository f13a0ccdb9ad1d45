"""The OpenAI-compatible HTTP server over `AsyncEngine`; `pip install 'vattn[server]'` brings what it needs."""

from __future__ import annotations

from vattn.errors import ConfigError

from ..config import EngineConfig
from .settings import ServerSettings

__all__ = ["ServerSettings", "serve"]


def serve(config: EngineConfig, settings: ServerSettings) -> int:
    """Load the model and serve it until SIGTERM or SIGINT; requests in progress are finished first.

    Afterwards the process ignores both signals: one that comes late would be its exit status.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: a package of the extra `server` is missing, the address cannot be used, or the model not be loaded.
    """
    try:
        # Here, so that the engine works without the packages of the extra.
        from .run import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vattn"):
            raise
        raise ConfigError(
            f"the server needs {error.name}, which is not installed: pip install 'vattn[server]'"
        ) from error
    return run(config, settings)
