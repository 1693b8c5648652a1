"""Reading and writing files safely: JSON only, written whole or not at all, never executed."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from profiles.checks import is_whole
from profiles.errors import FileFormatError

MAX_JSON_BYTES = 256 * 1024 * 1024


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write `content` to a temporary file beside `path`, flush it to disk and rename it into place."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes 0600; give what a plain open() would have given
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_json(path: str | os.PathLike[str], schema: str, version: int = 1) -> dict[str, Any]:
    """Read a JSON object and check its `schema` and `version`.

    A file that does not begin with `{` is refused after its first bytes (pickles, archives, scripts): nothing in a
    file is ever executed. Raises FileFormatError; FileNotFoundError passes through.
    """
    source = Path(path)
    with open(source, "rb") as stream:
        head = stream.read(64).lstrip(b" \t\r\n\xef\xbb\xbf")
        if not head.startswith(b"{"):
            raise FileFormatError(
                f"{source} is not a JSON object (it begins with {head[:8]!r}); it was refused unread",
                hint=f"expected a JSON file with schema {schema!r}; pickled files are never opened",
            )
        if os.fstat(stream.fileno()).st_size > MAX_JSON_BYTES:
            raise FileFormatError(f"{source} is larger than {MAX_JSON_BYTES} bytes; it was refused unread")
        stream.seek(0)
        raw = stream.read()
    try:
        document = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise FileFormatError(f"{source} is not valid JSON: {error}") from error
    check_schema(document, schema, version, str(source))
    return document


def check_schema(document: dict[str, Any], schema: str, version: int, where: str) -> None:
    """Raise FileFormatError unless `document` carries this `schema` and a version no newer than `version`."""
    if document.get("schema") != schema:
        raise FileFormatError(f"{where}: schema is {document.get('schema')!r}, expected {schema!r}")
    found = document.get("version")
    if not is_whole(found, 1, version):
        raise FileFormatError(f"{where}: version is {found!r}, this release reads 1 to {version}", hint="update treebudget")


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The sha256 of a file's bytes, in hex."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
