"""Where the brokers of a user are found: a folder of sockets that nobody else can enter."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from vattn.errors import ConfigError
from vattn.integers import shown

# Names the folder, in place of the usual one.
FOLDER_VARIABLE = "VATTN_POOL_DIR"
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,31}", re.ASCII)
_CREDENTIALS = struct.Struct("3i")
_LONGEST_PATH = 107  # sun_path, less its final zero


def check_name(name: object, what: str = "the pool's name") -> str:
    """The same name.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{what} is {shown(name)}; give up to 32 letters, digits, '_', '-' and '.'")
    return name


def borrower_name(model: str) -> str:
    """What `vattn pool` calls an engine: the last part of its model's name, in characters that need no quotes."""
    name = re.sub(r"[^\w.-]", "-", model.rstrip("/").rpartition("/")[2], flags=re.ASCII)[:32].lstrip("-.")
    return name or "engine"


def folder() -> Path:
    """The folder of sockets, made if it is not there.

    Raises:
        ConfigError: it cannot be made, is somebody else's, or others can enter it.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        path = Path(given)
    elif runtime and Path(runtime).is_dir():
        path = Path(runtime, "vattn")
    else:
        path = Path("/tmp", f"vattn-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"{path}, where pools are found, cannot be made ({error}); name another folder in {FOLDER_VARIABLE}"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path}, where pools are found, must be a folder of your own that nobody else can enter: "
            f"chmod 700 it, or name another in {FOLDER_VARIABLE}"
        )
    return path


def socket_path(name: str) -> Path:
    """The socket of a pool's broker.

    Raises:
        ConfigError: the name is none, or the path is too long for a socket.
    """
    return _path(f"{check_name(name)}.sock")


def left_path(broker: Path, identity: str) -> Path:
    """The file that says how many bytes a borrower still had when it ended without a broker to tell.

    Args:
        broker: its socket.

    Raises:
        ConfigError: the identity is none.
    """
    return broker.with_name(f"{broker.stem}.{check_name(identity, 'the identity of a borrower')}.left")


def prefiller_path(pool: str, sharing: bytes) -> Path:
    """A path that nobody has, for the socket of an engine that computes prompts for others which share its blocks.

    Raises:
        ConfigError: as `socket_path`.
    """
    return _path(f"{check_name(pool)}.{_digest(sharing)}.{secrets.token_hex(4)}.prefill")


def prefillers(pool: str, sharing: bytes) -> list[Path]:
    """The sockets of such engines, some of which may have ended."""
    return sorted(folder().glob(f"{check_name(pool)}.{_digest(sharing)}.*.prefill"))


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel says."""
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(answer)
    return pid, uid, gid


def pools() -> Iterator[str]:
    """The names of the pools that there are sockets of, in order; their brokers may have ended."""
    yield from sorted(path.stem for path in folder().glob("*.sock") if _NAME.fullmatch(path.stem))


def _path(name: str) -> Path:
    path = folder() / name
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(f"{path} is too long for a socket; name a shorter folder in {FOLDER_VARIABLE}")
    return path


def _digest(sharing: bytes) -> str:
    return sharing[:6].hex()
