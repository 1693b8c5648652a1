"""A target from its configuration alone, with random weights: what a forward costs does not depend on them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import nn

from costmodel.shapes import shipped_models
from decoder.errors import TargetError

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def random_model(name_or_path: str, dtype: torch.dtype, device: str, tensor_parallel: int = 1) -> nn.Module:
    """A model of that configuration with random weights; TargetError where no configuration can be read."""
    from transformers import AutoModelForCausalLM

    from decoder.target import dtype_argument, quiet_loading

    try:
        config = read_config(name_or_path)
        if tensor_parallel > 1:
            from decoder.parallel import random_shards

            return random_shards(config, dtype, tensor_parallel)
        with torch.device(device), quiet_loading():
            return AutoModelForCausalLM.from_config(config, **dtype_argument(dtype))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(f"cannot build {name_or_path} from its configuration: {reason}", hint=_hint()) from error


def read_config(name_or_path: str) -> Any:
    """The transformers configuration of a registered name, a folder, a config.json or a hub id.

    Hub ids of the models whose numbers come with the library (profiles/models.json) need no network. Raises OSError,
    ValueError or TargetError where there is none to be had.
    """
    from transformers import AutoConfig

    from decoder.pull import KNOWN_TARGETS, target_folder

    if name_or_path in KNOWN_TARGETS:
        return AutoConfig.from_pretrained(str(target_folder(name_or_path)))
    path = Path(name_or_path).expanduser()
    if path.exists():
        return AutoConfig.from_pretrained(str(path))
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1:
        raise TargetError(f"there is no configuration at {name_or_path}", hint=_hint())
    shipped = shipped_models().get(name_or_path)
    if shipped is not None:
        return AutoConfig.for_model(**shipped)
    try:
        return AutoConfig.from_pretrained(name_or_path, local_files_only=True)
    except OSError:
        if not hub_has_address():
            raise TargetError(f"the configuration of {name_or_path} is not in the hub's cache, and the hub cannot be reached",
                              hint=_hint()) from None
    return AutoConfig.from_pretrained(name_or_path)


def hub_has_address() -> bool:
    """Whether the hub's name can be resolved, or a proxy does that; saves a minute of retries where there is no network."""
    if any(os.environ.get(name) for name in PROXIES):
        return True
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or ""
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


def config_name(name_or_path: str) -> str:
    """What such a model is called: the last part of a hub id or folder, also of its config.json."""
    path = Path(name_or_path)
    return path.resolve().parent.name if path.name == "config.json" else path.name


def _hint() -> str:
    known = ", ".join(sorted(shipped_models()))
    return ("a configuration alone is enough: give a folder with config.json, the path of a config.json, a hub id in the hub's "
            f"cache, or one whose numbers come with the library ({known})")
