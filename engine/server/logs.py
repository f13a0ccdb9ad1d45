"""The server's log: one JSON object per line, on standard error."""

from __future__ import annotations

import json
import logging
import logging.config
import time
from typing import Any


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, the traceback of an error, and what a call added as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(level: str) -> None:
    """Send what every library of the process logs to standard error."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonFormatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
            # Clients' own libraries, if one runs in this process, write a line per call.
            "loggers": {"httpx": {"level": "WARNING"}, "uvicorn.access": {"level": "WARNING"}},
        }
    )
