"""`run`: a process that serves until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import uvicorn

from vattn.errors import ConfigError

from ..config import EngineConfig
from ..core import EngineCore
from . import logs
from .app import make_app, make_service
from .connections import limited_to
from .service import Service
from .settings import ServerSettings, check_key

logger = logging.getLogger(__name__)

KEY_VARIABLE = "VATTN_API_KEY"  # a key that no list of processes shows
_SWITCH_SECONDS = 0.0005
_FULL_AFTER = 100  # collections of the second kind: 700,000 new objects, if all of them stay
_COLLECT_SECONDS = 1.0
_M_ARENA_MAX = -8  # glibc's number
_ARENAS = 2
_GRACE = 5.0  # seconds that clients have to read what the engine has finished
_TLS_END_SECONDS = 1.0
_LAST_GRACE = 0.5  # where the server is to end at once


def run(config: EngineConfig, settings: ServerSettings) -> int:
    """As `serve`."""
    _share_arenas()
    logs.set_up(settings.log_level)
    key = os.environ.get(KEY_VARIABLE)
    if key is not None:
        check_key(KEY_VARIABLE, key)
        settings = replace(settings, api_key=[*settings.api_key, key])
    # First, since loading a model may take minutes.
    with _bind(settings) as listener:
        root = config.model if isinstance(config.model, str) else type(config.model).__name__
        logger.info("loading", extra={"fields": {"model": root}})
        service = make_service(EngineCore(config), settings, root)
        server = _make_server(service, listener)
        _keep_threads_apart()
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(_serve(server, service, listener))
    return 0


def _keep_threads_apart() -> None:
    """Keep the event loop from waiting long for other threads, and all of them for the garbage collector."""
    # Whenever the loop asks the system for something, it waits for each thread that runs Python for this long; thrice
    # for an answer.
    sys.setswitchinterval(_SWITCH_SECONDS)
    # A full collection stops all threads, for as long as it takes to look at every object that it knows: 100 ms for
    # a request of 4,096 prompts. `_collect` is for those that are needed.
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_AFTER)


def _share_arenas() -> None:
    """Keep glibc from giving every thread an arena of its own, of which each would keep what it once needed."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, _ARENAS)


class _Server(uvicorn.Server):
    """uvicorn's server, which says where it listens once it does."""

    def __init__(self, config: uvicorn.Config, fields: dict[str, Any], settings: ServerSettings) -> None:
        super().__init__(config)
        self._fields = fields
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.is_ssl:
            # asyncio waits a minute for a handshake, and half of one for a client to confirm that it is over.
            loop = asyncio.get_running_loop()
            handshake_seconds = self._settings.receive_timeout
            timeouts = {"ssl_handshake_timeout": handshake_seconds, "ssl_shutdown_timeout": _TLS_END_SECONDS}
            loop.create_server = functools.partial(loop.create_server, **timeouts)  # type: ignore[method-assign]
        try:
            await super().startup(sockets)
        except OSError as error:
            # Sockets may share an address until one of them listens: another server's, while both load their models.
            raise _cannot_listen(self._settings, error.strerror) from error
        logger.info("serving", extra={"fields": self._fields})

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `_serve`: uvicorn raises them again when it ends, which would be the exit status."""
        yield


def _make_server(service: Service, listener: socket.socket) -> _Server:
    settings = service.settings
    scheme = "https" if settings.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    return _Server(
        uvicorn.Config(
            make_app(service),
            http=limited_to(settings.receive_timeout),
            timeout_keep_alive=settings.keep_alive_timeout,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=settings.ssl_cert_reqs,
            # `_serve` ends all that there is, without an error in the log.
            lifespan="off",
        ),
        {"url": url, "models": service.names, "pid": os.getpid()},
        settings,
    )


async def _serve(server: _Server, service: Service, listener: socket.socket) -> None:
    settings = service.settings
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    async def drain(timeout: float) -> None:
        await service.engine.shutdown(timeout=timeout)
        await asyncio.sleep(_GRACE)
        end_connections()

    def end_connections() -> None:
        for connection in list(server.server_state.connections):
            connection.transport.abort()

    def stop() -> None:
        """Accept no more, and give what runs its time; the second time, end at once."""
        timeout = settings.shutdown_timeout
        if server.should_exit:
            timeout = 0
            server.force_exit = True
        logger.info("stopping", extra={"fields": {"unfinished": service.engine.num_unfinished, "seconds": timeout}})
        server.should_exit = True
        drains.append(asyncio.ensure_future(drain(timeout)))

    # Not by `add_signal_handler`: such handlers end with the loop, and a late signal would be the exit status.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
    collecting = asyncio.ensure_future(_collect(server))
    try:
        await server.serve(sockets=[listener])
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # until the process ends, which it does at once
        collecting.cancel()
        service.close()
        await service.engine.shutdown(timeout=0)
        if server.server_state.tasks:
            await asyncio.wait(server.server_state.tasks, timeout=_LAST_GRACE)
        end_connections()
        if server.server_state.tasks:
            await asyncio.wait(server.server_state.tasks, timeout=_LAST_GRACE)
        for draining in drains:
            draining.cancel()
        await asyncio.gather(collecting, *drains, return_exceptions=True)


async def _collect(server: _Server) -> None:
    """Collect all garbage now and then, while there are no requests and so few objects."""
    while True:
        await asyncio.sleep(_COLLECT_SECONDS)
        if any(gc.get_count()[1:]) and not server.server_state.tasks:
            gc.collect()


def _bind(settings: ServerSettings) -> socket.socket:
    """A socket at the address, which does not listen yet."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((settings.host, settings.port))
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(
            settings, error.strerror if isinstance(error, OSError) else "that is no name of a host"
        ) from error
    return listener


def _cannot_listen(settings: ServerSettings, why: str | None) -> ConfigError:
    where = f"{settings.host}:{settings.port}"
    return ConfigError(f"the server cannot listen on {where}: {why}; give another --host or --port")
