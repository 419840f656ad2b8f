"""A wrong setting ends a program with one line, not with a stack trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, InstantiationException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_dp.errors import ConfigurationError, PreflightError

EXIT_CODE = 2


@contextmanager
def one_line_errors() -> Generator[None, None, None]:
    """Turns an error of configuration or start into one line on stderr and exit code 2; other errors pass.

    Put it around a Hydra program for what goes wrong while the configuration is composed, and around the body of its
    task for what goes wrong while objects are built from it: Hydra adds lines of its own to errors that leave a task.
    """
    # Hydra prints errors over several lines and exits by itself unless it is told to let them through.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    except PreflightError as error:
        print(f"wrong start: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
    except (HydraException, OmegaConfBaseException, ConfigurationError) as error:
        line = _one_line(error)
        if line is None:
            raise
        print(f"configuration error: {line}", file=sys.stderr)
        sys.exit(EXIT_CODE)


def _one_line(error: BaseException) -> str | None:
    """What is wrong and what is allowed; ``None`` if the cause is no setting but a failure while running."""
    own = next((cause for cause in _chain(error) if isinstance(cause, ConfigurationError)), None)
    if own is not None:
        return str(own)
    for cause in _chain(error):
        if isinstance(cause, MissingConfigException) and cause.options is not None and cause.missing_cfg_file:
            group, _, choice = cause.missing_cfg_file.rpartition("/")
            return f"{group}={choice} is not known: use one of {', '.join(cause.options)}"
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and isinstance(cause.parent_node, DictConfig):
            return _unknown_key(str(cause.full_key), cause.parent_node)
        if isinstance(cause, InstantiationException):
            # A class that cannot be found is a wrong setting; one that raises deserves its stack trace.
            if not str(cause).startswith("Error locating target"):
                return None
            return " ".join(f"{str(cause).split(', set env var')[0]}: {cause.__cause__}".split())
        if isinstance(cause, OmegaConfBaseException):
            line = str(cause).splitlines()[0]
            return f"{cause.full_key}: {line}" if cause.full_key else line
        root = cause
    return " ".join(str(root).split()) if isinstance(root, HydraException) else None


def _unknown_key(key: str, parent: DictConfig) -> str:
    where = parent._get_full_key(None) or "the configuration"
    allowed = ", ".join(sorted(str(name) for name in parent if not str(name).startswith("_")))
    typed = parent._metadata.object_type not in (dict, None)
    hint = "" if typed else f" (one that is not listed can be added: +{key}=...)"
    return f"{key} is no key of {where}; its keys are: {allowed}{hint}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
