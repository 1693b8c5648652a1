"""Writing a trace text by text, so that a run that was killed goes on."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selector.errors import TraceMismatch
from selector.trace import Trace, TraceText


class TraceWriter:
    """Writes texts as they come, each as a part file of its own, so that a killed trace loses only the text in flight.

    Parts lie in `<path>.parts/`; `finish` merges them into `path` and removes them. Parts of another identity are
    refused by name.
    """

    def __init__(self, path: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        """Open the folder of parts, making it if need be; raises TraceMismatch if it holds parts of another identity."""
        self.path = Path(path)
        self.folder = self.path.with_name(self.path.name + ".parts")
        self.identity = dict(identity)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._parts: dict[str, Path] = {}
        for part in sorted(self.folder.glob("*.safetensors")):
            trace = Trace.load(part)
            # contexts last: they follow from the settings, of which one is to blame
            for name in sorted(set(trace.identity) | set(self.identity), key=lambda name: (name == "context_tokens", name)):
                if trace.identity.get(name) != self.identity.get(name):
                    raise TraceMismatch(name, self.identity.get(name), trace.identity.get(name))
            self._parts.update({text.key: part for text in trace.texts})

    @property
    def done_keys(self) -> set[str]:
        """Keys of the texts that are on disk already."""
        return set(self._parts)

    def add(self, text: TraceText) -> None:
        """Write one text at once; a key that is there already is replaced."""
        digest = hashlib.sha256(text.key.encode("utf-8")).hexdigest()[:16]
        part = self.folder / f"{digest}.safetensors"
        Trace(self.identity, [text]).save(part)
        self._parts[text.key] = part

    def finish(self, keys: Sequence[str] | None = None) -> Trace:
        """Merge the parts (in the order of `keys`, default sorted; others are left out) into `path`; returns the trace."""
        order = sorted(self._parts) if keys is None else [key for key in keys if key in self._parts]
        traces = [Trace.load(self._parts[key]) for key in order]
        trace = Trace.merge(traces) if traces else Trace(self.identity, [])
        trace.save(self.path)
        for part in self.folder.iterdir():
            if part.suffix in (".safetensors", ".tmp"):  # parts, and what a killed write left behind
                part.unlink()
        with contextlib.suppress(OSError):  # not empty: someone else's files stay
            self.folder.rmdir()
        return trace
