"""Arrays in one safetensors file with a JSON description: what traces and scorers are kept in; nothing is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from profiles.errors import FileFormatError
from profiles.files import check_schema, write_atomic

_KEY = "treebudget"  # of the metadata


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, NDArray[Any]], schema: str, version: int, about: Mapping[str, Any]
) -> Path:
    """Write the file, whole or not at all; `about` holds plain JSON types."""
    described = json.dumps({"schema": schema, "version": version, **about})
    return write_atomic(path, save(dict(tensors), metadata={_KEY: described}))


def read_tensors(path: str | os.PathLike[str], schema: str, version: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The description and the arrays by name.

    Raises FileNotFoundError, or FileFormatError for a file that is no such file, of another schema or a newer version; its
    message is the second half of a sentence that names the file.
    """
    try:
        with safe_open(path, framework="numpy") as stream:
            about = json.loads((stream.metadata() or {}).get(_KEY, "{}"))
            if not isinstance(about, dict):
                raise FileFormatError(f"its description must be a JSON object, got {type(about).__name__}")
            check_schema(about, schema, version, "its description")  # before the arrays: other files' may be large
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:  # TypeError: a dtype that numpy lacks
        raise FileFormatError(f"it cannot be read: {error}") from error
    return about, tensors
