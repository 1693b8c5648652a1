"""What was chosen on one table judged on another: the sampler's start, and the whole method on tables it was not made with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from costmodel.compose import CONTEXTS, compose_profile
from costmodel.model import CostModel
from costmodel.operators import OperatorTables
from costmodel.sampler import FIRST_SIZES, sample_table
from costmodel.shapes import find_shape

Array = NDArray[np.float64]
Table = tuple[list[int], Array, Array]  # contexts (C,), sizes (T,), seconds (C, T)
STARTS = (FIRST_SIZES, (1, 64, 512), (1, 512), (1, 16, 128, 512))
UNSEEN = (
    ("a100_sxm", "Qwen/Qwen3-4B"), ("a100_sxm", "meta-llama/Llama-3.1-8B"), ("h100_sxm", "Qwen/Qwen3-4B"),
    ("h100_sxm", "meta-llama/Llama-3.1-8B"), ("h200_sxm", "Qwen/Qwen3-8B"), ("l40s", "Qwen/Qwen3-8B"),
    ("b200_sxm", "meta-llama/Llama-3.1-8B"),
)  # fmt: skip


def sampled_errors(table: Table, num_points: int, first_sizes: Sequence[int] = FIRST_SIZES) -> dict[str, Array]:
    """Absolute relative errors (C, T) of the table form and of the convex form fitted to the points the sampler chose."""
    contexts, sizes, seconds = table
    rows = {context: seconds[index] for index, context in enumerate(contexts)}
    columns = {int(size): index for index, size in enumerate(sizes)}
    profile = sample_table(lambda t, c: float(rows[c][columns[t]]), list(columns), contexts, num_points, first_sizes)
    cost = CostModel(profile)
    found = {}
    for form in ("table", "convex"):
        predicted = [cost.verify_seconds(sizes, context, form=form) for context in contexts]  # type: ignore[arg-type]
        found[form] = np.abs(np.array(predicted) / seconds - 1.0)
    return found


def crossed(tables: dict[str, Table], num_points: int, starts: Sequence[Sequence[int]] = STARTS) -> Iterable[list[str]]:
    """Every table judged with the start that was best (mean of the table form) on the other tables."""
    errors = {name: [sampled_errors(table, num_points, start) for start in starts] for name, table in tables.items()}
    for name, own in errors.items():
        others = [[float(item["table"].mean()) for item in found] for other, found in errors.items() if other != name]
        best = int(np.argmin(np.mean(others, axis=0)))
        means = [float(item["table"].mean()) for item in own]
        yield [
            name, ", ".join(map(str, starts[best])), *summary(own[best]["table"]), *summary(own[best]["convex"]),
            f"{min(means):.2%} to {max(means):.2%}",
        ]  # fmt: skip


def unseen(num_points: int, pairs: Sequence[tuple[str, str]] = UNSEEN) -> Iterable[list[str]]:
    """The sampler and both forms on composed tables of 9 contexts x 512 sizes. Raises OpsNotInstalled."""
    sizes = np.arange(1, 513)
    for system, model in pairs:
        operators = OperatorTables.find(system)
        profile = compose_profile(find_shape(model), operators, sizes=sizes.tolist(), contexts=CONTEXTS, requests=(1,))
        cells = {(cell.verify_tokens, cell.context_tokens): cell.seconds for cell in profile.verify}
        seconds = np.array([[cells[int(size), context] for size in sizes] for context in CONTEXTS])
        errors = sampled_errors((list(CONTEXTS), sizes.astype(float), seconds), num_points)
        yield [f"{system} {operators.engine} {operators.version}", model, *summary(errors["table"]), *summary(errors["convex"])]


def summary(errors: Array) -> list[str]:
    """Mean and 95th percentile of absolute relative errors."""
    return [f"{errors.mean():.2%}", f"{np.quantile(errors, 0.95):.2%}"]
