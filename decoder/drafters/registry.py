"""Drafters by name: shipped ones, folders, and hub ids of public DFlash checkpoints."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from decoder.errors import DrafterError

if TYPE_CHECKING:
    from decoder.drafters.base import Drafter
    from decoder.target import Target

SHIPPED = {"smollm2-135m-dflash": "smollm2-135m"}
"""Drafters that come with the package, and the target each was trained for."""


def shipped_folder(name: str) -> Path:
    """Where a shipped drafter's files are."""
    return Path(str(files("decoder") / "assets" / name))


def find_drafter(name_or_path: str) -> Path:
    """A shipped name, a folder, or a hub id (downloaded to the hub's own cache); DrafterError says what was tried."""
    if name_or_path in SHIPPED:
        return shipped_folder(name_or_path)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if name_or_path.count("/") == 1 and not name_or_path.startswith((".", "/", "~")):
        return _download(name_or_path)
    raise DrafterError(f"no drafter {name_or_path!r}: neither shipped ({', '.join(SHIPPED)}) nor a folder nor a hub id",
                       hint="train one: decoder train --help")


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["config.json", "*.safetensors"]))
    except Exception as error:  # the hub's client raises many kinds; all mean that the drafter is not to be had
        raise DrafterError(f"cannot fetch drafter {hub_id}: {str(error).strip().splitlines()[0]}",
                           hint="give a folder with config.json and model.safetensors") from error


def load_drafter(name_or_path: str, target: Target) -> Drafter:
    """Load a DFlash drafter for a loaded target, in its dtype, on its device, with its form of linear layers."""
    from decoder.drafters.dflash import DFlashDrafter

    folder = find_drafter(name_or_path)
    name = name_or_path if name_or_path in SHIPPED else folder.name
    return DFlashDrafter.load(folder, target.embed, target.head, name=name, linear=target.linear)
