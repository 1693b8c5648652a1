"""Samples kept as they are taken: a JSON-lines file that a kill -9 can only cost its last line."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from costmodel.cells import STAGES
from costmodel.plan import Shape
from profiles.checks import LARGEST, is_number, is_whole

SCHEMA = "treebudget.profile-partial"


@dataclass(frozen=True)
class Sample:
    """One timed call: what was asked, what was executed, how long it took. `role` is `grid` or `reference`."""

    round_index: int
    role: str
    shape: Shape
    executed: int
    seconds: float


class SampleLog:
    """An append-only list of samples; with a path, every sample is flushed to disk before the next is taken.

    The file begins with a line that carries `key`; a file with another key (another identity or grid), or none that can
    be read, is started anew. A torn last line is dropped and overwritten.
    """

    def __init__(self, path: str | os.PathLike[str] | None, key: str) -> None:
        self.samples: list[Sample] = []
        self._stream: IO[bytes] | None = None
        if path is None:
            return
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        valid_bytes = self._read(file, key)
        self._stream = open(file, "r+b" if valid_bytes else "wb")
        self._stream.truncate(valid_bytes)
        self._stream.seek(valid_bytes)
        if not valid_bytes:
            self._write({"schema": SCHEMA, "version": 1, "key": key})

    @property
    def num_resumed(self) -> int:
        """Samples read back from an earlier run."""
        return self._num_resumed

    _num_resumed = 0

    def _read(self, file: Path, key: str) -> int:
        """Load the samples of an earlier run; returns how many bytes of the file are whole, 0 to start anew."""
        if not file.is_file():
            return 0
        valid = 0
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True)):
            document = _parse(line)
            if document is None:
                break
            if number == 0:
                if document.get("schema") != SCHEMA or document.get("key") != key:
                    return 0
            else:
                sample = _sample(document)
                if sample is None:
                    break
                self.samples.append(sample)
            valid += len(line)
        self._num_resumed = len(self.samples)
        return valid

    def append(self, sample: Sample) -> None:
        """Keep a sample, on disk before this returns."""
        self.samples.append(sample)
        shape = sample.shape
        self._write(
            {
                "round": sample.round_index,
                "role": sample.role,
                "stage": shape.stage,
                "size": shape.size,
                "context_tokens": shape.context_tokens,
                "num_requests": shape.num_requests,
                "executed": sample.executed,
                "seconds": sample.seconds,
            }  # fmt: skip
        )

    def _write(self, document: dict[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps(document).encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file; it stays for the next run until its profile is written."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        document = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return None
    return document if isinstance(document, dict) else None


def _sample(document: dict[str, Any]) -> Sample | None:
    """A sample from its line; None for a line that no run wrote, which ends what is read back."""
    counts = [document.get(name) for name in ("round", "size", "context_tokens", "num_requests", "executed")]
    whole = all(is_whole(count, 0, LARGEST - 1) for count in counts)
    stage, role, seconds = (document.get(name) for name in ("stage", "role", "seconds"))
    timed = is_number(seconds, 0) and 0 < seconds < 1e9
    if not (whole and timed and stage in ("verify", *STAGES) and isinstance(role, str)):
        return None
    shape = Shape(stage, document["size"], document["context_tokens"], document["num_requests"])
    return Sample(document["round"], role, shape, document["executed"], float(document["seconds"]))
