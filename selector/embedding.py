"""A target's token embedding as an array: one tensor of a safetensors file, read without torch, bfloat16 included."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.paths import cache_dir
from selector.errors import ScorerError

NAMES = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight", "wte.weight")
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100 * 2**20


def find_embedding(target: str) -> Path | None:
    """The folder of a target: a path as it is, or where this machine keeps the target of that name; None if it is not here."""
    for folder in (Path(target), cache_dir() / "targets" / target):
        if (folder / "model.safetensors").exists() or (folder / "model.safetensors.index.json").exists():
            return folder
    return None


def read_embedding(where: str | os.PathLike[str], name: str | None = None) -> NDArray[np.float32]:
    """The embedding matrix (vocab, hidden) as float32.

    Args:
        where: a safetensors file, or a folder with `model.safetensors` or its parts and their index.
        name: of the tensor; default the first of the usual names that is there.

    Raises ScorerError if the file is missing or is none, has no such tensor, or holds it in another type than float32,
    float16 or bfloat16, or not as a matrix.
    """
    path = _file_of(Path(where), name)
    try:
        with open(path, "rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            if size > _MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(stream.read(size))
            found = _tensor_name(header, name, path)
            about = header[found]
            begin, end = about["data_offsets"]
            if not 0 <= begin <= end <= os.fstat(stream.fileno()).st_size:
                raise ValueError("its offsets lie outside of it")
            stream.seek(8 + size + begin)
            raw = stream.read(end - begin)
        return _widen(raw, about, found, path)
    except FileNotFoundError as error:
        raise ScorerError(f"no embedding at {path}", hint="name one with --embedding FILE.safetensors[:TENSOR]") from error
    except (struct.error, ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError) as error:
        raise ScorerError(f"{path} holds no readable embedding: {error}", hint="expected a safetensors file") from error


def _file_of(where: Path, name: str | None) -> Path:
    """The file that holds the tensor, where a folder was named."""
    if not where.is_dir():
        return where
    index = where / "model.safetensors.index.json"
    if not index.exists():
        return where / "model.safetensors"
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return where / Path(places[_tensor_name(places, name, index)]).name
    except (ValueError, KeyError, TypeError) as error:
        raise ScorerError(f"{index} is no index of safetensors files: {error}") from error


def _tensor_name(names: Any, wanted: str | None, path: Path) -> str:
    for candidate in (wanted,) if wanted else NAMES:
        if candidate in names:
            return candidate
    asked = repr(wanted) if wanted else f"any of {', '.join(NAMES)}"
    raise ScorerError(f"{path} has no tensor {asked}", hint="name the embedding with --embedding FILE.safetensors:TENSOR")


def _widen(raw: bytes, about: dict[str, Any], name: str, path: Path) -> NDArray[np.float32]:
    """The tensor's bytes as float32 (bfloat16 is the upper half of a float32)."""
    dtype, shape = about["dtype"], tuple(int(n) for n in about["shape"])
    if dtype not in _WIDTHS or len(shape) != 2:
        raise ScorerError(f"{path}: {name} must be a matrix of {', '.join(_WIDTHS)}, found {dtype} {shape}")
    if len(raw) != _WIDTHS[dtype] * shape[0] * shape[1] or not raw:
        raise ScorerError(f"{path}: {name} is cut short: {len(raw)} bytes for {shape} of {dtype}")
    if dtype == "BF16":
        table = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    else:
        table = np.frombuffer(raw, "<f4" if dtype == "F32" else "<f2").astype(np.float32).reshape(shape)
    if not np.isfinite(table).all():
        raise ScorerError(f"{path}: {name} holds values that are not finite")
    return table
