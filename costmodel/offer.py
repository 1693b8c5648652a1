"""What there is for a GPU that this machine does not have: a shipped profile, a composed one, or an estimate."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from costmodel.errors import NotMeasured, OpsNotInstalled, UsageError
from costmodel.gpus import Gpu, find_gpu
from costmodel.profile import PROVENANCES, Profile
from costmodel.shapes import ModelShape, find_shape
from profiles import index
from profiles.paths import target_slug

ORDER = {name: rank for rank, name in enumerate(("measured", "published", "composed", "estimated"))}
assert set(ORDER) == set(PROVENANCES)


@dataclass(frozen=True)
class Offer:
    """A profile, its file where it is shipped, and in words how it came about."""

    profile: Profile
    path: Path | None
    how: str


def local_gpus() -> list[str]:
    """Names of the NVIDIA GPUs of this machine, as the driver reports them; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]


def has_gpu(name: str) -> bool:
    """Whether a GPU of this name is in this machine."""
    wanted = find_gpu(name)
    for local in local_gpus():
        try:
            if find_gpu(local) == wanted:
                return True
        except UsageError:
            continue
    return False


def offer_profile(gpu_name: str, target: str, require_measured: bool = False) -> Offer:
    """The best there is for this GPU and target: shipped (measured before published before composed), else composed, else
    estimated. Raises NotMeasured where a measurement is required and there is none, UsageError for unknown names."""
    gpu = find_gpu(gpu_name)
    shipped = shipped_offers(gpu, target)
    if shipped and (shipped[0].profile.provenance == "measured" or not require_measured):
        return shipped[0]
    if require_measured:
        what = f"the best there is, is {shipped[0].profile.provenance}" if shipped else "nothing was shipped for it"
        raise NotMeasured(
            f"no {gpu.name} is in this machine and no measured profile of {target} on one is known; {what}",
            hint="run `costmodel profile` on that GPU, or leave out --require-measured",
        )
    return compose_or_estimate(gpu, find_shape(target))


def compose_or_estimate(gpu: Gpu, shape: ModelShape) -> Offer:
    """Composed from operator tables where they are installed and cover this GPU and model, else a roofline estimate."""
    from costmodel.compose import compose_profile
    from costmodel.operators import OperatorTables
    from costmodel.roofline import estimate_profile

    reason = f"there are no operator tables for {gpu.name}"
    if gpu.operator_tables is not None:
        try:
            tables = OperatorTables.find(gpu.operator_tables)
            return Offer(compose_profile(shape, tables), None, f"composed from {tables.label}")
        except (OpsNotInstalled, UsageError) as error:
            reason = str(error)
    return Offer(estimate_profile(gpu, shape), None, f"estimated by a roofline, since {reason}")


def shipped_offers(gpu: Gpu, target: str) -> list[Offer]:
    """Shipped profiles of this GPU and target, best provenance first. Their names begin with GPU and model."""
    beginnings = [f"{alias}-{target_slug(target)}" for alias in gpu.aliases]
    found = []
    for name in index.names():
        if any(name == start or name.startswith(f"{start}-") for start in beginnings):
            path = index.find(name)
            found.append(Offer(Profile.load(path), path, f"shipped as {name}"))
    return sorted(found, key=lambda offer: ORDER[offer.profile.provenance])
