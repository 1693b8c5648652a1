"""`costmodel list`: the profiles there are, and the GPU facts and model shapes that others are built from, with sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from costmodel.clitools import emit_json, json_option
from costmodel.errors import TreebudgetError
from costmodel.gpus import known_gpus
from costmodel.loading import measured_profiles
from costmodel.profile import Profile
from costmodel.shapes import model_sources
from profiles import index


@click.command("list")
@json_option
def list_profiles(as_json: bool) -> None:
    """List the shipped profiles, those this machine has measured, and the GPUs and models that others can be composed for.

    \b
    Example:
      costmodel list --json
    """
    profiles, gpus, models = profile_rows(), gpu_rows(), model_rows()
    if as_json:
        document = {"profiles": profiles, "gpus": gpus, "models": models}
        emit_json({"schema": "treebudget.profile-list", "version": 1, **document})
        return
    for row in profiles:
        of = ", ".join(row[key] for key in ("device", "target") if row[key])
        click.echo("; ".join(filter(None, [f"{row['name']}  ({row['where']}", row["provenance"], of, f"{row['source']})"])))
    click.echo("\nGPU facts, for --gpu:")
    for row in gpus:
        tables = f"; operator tables {row['operator_tables']}" if row["operator_tables"] else ""
        click.echo(f"{row['name']}  ({', '.join(row['aliases'])}{tables}; sources: {'; '.join(row['sources'])})")
    click.echo("\nmodel shapes, for --model:")
    for row in models:
        doubt = f"UNVERIFIED: {', '.join(row['unverified'])}; " if row["unverified"] else ""
        click.echo(f"{row['name']}  ({doubt}{'; '.join(row['sources']) or 'no source'})")


def profile_rows() -> list[dict[str, Any]]:
    """One row for every shipped profile and every one in this machine's cache; a file that cannot be read says why."""
    found = [(name, "shipped", index.find(name)) for name in index.names()]
    found += [(name, "this machine", path) for name, path in measured_profiles().items()]
    return [{"name": name, "where": where, "path": str(path), **_head(path)} for name, where, path in found]


def gpu_rows() -> list[dict[str, Any]]:
    """The GPUs of the facts file: rates in FLOP/s and bytes/s, memory in bytes, and where they come from."""
    return [
        {
            "name": gpu.name, "aliases": list(gpu.aliases), "flops_per_second": gpu.flops_per_second,
            "bytes_per_second": gpu.bytes_per_second, "memory_bytes": gpu.memory_bytes, "operator_tables": gpu.operator_tables,
            "sources": list(gpu.sources),
        }
        for gpu in known_gpus()
    ]  # fmt: skip


def model_rows() -> list[dict[str, Any]]:
    """The shipped model shapes: the public copies their numbers were compared with, and the fields nothing confirms."""
    return [
        {"name": name, "sources": list(source.sources), "unverified": list(source.unverified)}
        for name, source in model_sources().items()
    ]


def _head(path: Path) -> dict[str, str | None]:
    try:
        read = Profile.load(path)
    except (TreebudgetError, OSError) as error:
        return {"provenance": "unreadable", "source": str(error), "device": None, "target": None}
    return {"provenance": read.provenance, "source": read.source, "device": read.identity.device, "target": read.identity.target}
