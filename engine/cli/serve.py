"""`vattn serve`."""

from __future__ import annotations

import argparse

from vattn.errors import ConfigError

from ..config import EngineConfig
from ..shipped_model import SHIPPED_MODEL, shipped_model
from .engine_flags import add_engine_flags, add_model, engine_options
from .extras import require_server_extra
from .flags import Commands, Help, add_fields, given


def add_to(commands: Commands, help: str) -> None:
    """Add `serve`; without its packages it takes any arguments, and says what to install."""
    try:
        from ..server.settings import ServerSettings
    except ModuleNotFoundError as error:
        # No argument starts with this prefix, so that all of them are positional.
        parser = commands.add_parser("serve", help=help, add_help=False, prefix_chars="\0")
        parser.add_argument("ignored", nargs="*", help=argparse.SUPPRESS)
        parser.set_defaults(run=_refuse, missing=error.name)
        return
    parser = commands.add_parser("serve", help=help, formatter_class=Help)
    add_model(parser)
    add_fields(parser.add_argument_group("server"), ServerSettings)
    add_engine_flags(parser)
    parser.set_defaults(run=_run)


def _refuse(args: argparse.Namespace) -> int:
    raise ConfigError(f"vattn serve needs {args.missing}: pip install 'vattn[server]'")


def _run(args: argparse.Namespace) -> int:
    from ..server.settings import ServerSettings

    # The log, of JSON lines only, says which model it is.
    model = shipped_model() if args.model is None else args.model
    config = EngineConfig(model=model, **engine_options(args))
    named = {} if args.model is not None else {"served_model_name": (SHIPPED_MODEL.name,)}
    settings = ServerSettings(**(named | given(args, ServerSettings)))
    require_server_extra("vattn serve")

    from ..server import serve

    status: int = serve(config, settings)
    return status
