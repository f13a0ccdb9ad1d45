"""The server's log: one JSON object per line, on standard error."""

from __future__ import annotations

import json
import logging
import logging.config
import threading
import time
from typing import Any

import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars

logger = logging.getLogger(__name__)


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
    """Send what every library of the process logs or warns of, and what ends a thread, to standard error."""
    logging.captureWarnings(True)
    threading.excepthook = _log_end_of_thread
    # Progress bars are no lines of JSON.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    disable_progress_bars()
    # These write to standard error on their own.
    others = {name: {"handlers": [], "propagate": True} for name in ("transformers", "huggingface_hub")}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonFormatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
            # Clients' own libraries, if one runs in this process, write a line per call.
            "loggers": {"httpx": {"level": "WARNING"}, "uvicorn.access": {"level": "WARNING"}, **others},
        }
    )


def _log_end_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_type is not SystemExit and end.exc_value is not None:
        name = end.thread.name if end.thread is not None else "unknown"
        logger.error("a thread ended by an error", exc_info=end.exc_value, extra={"fields": {"thread": name}})
