"""Choosing a few points out of a table that is already known: how well the fit does from them is a test of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from costmodel.adaptive import AdaptivePlan
from costmodel.choose import Points, choose
from costmodel.partial import Sample
from costmodel.plan import Shape
from costmodel.profile import Profile

FIRST_SIZES = (1, 128, 512)


def sample_table(
    seconds: Callable[[int, int], float],
    sizes: Sequence[int],
    contexts: Sequence[int],
    num_points: int,
    first_sizes: Sequence[int] = FIRST_SIZES,
) -> Profile:
    """A profile of at most `num_points` points, chosen one widest gap after another as the profiler chooses them.

    `seconds(t, c)` is read only at the points chosen. It begins with `first_sizes` at the first, middle and last context.
    """
    plan = AdaptivePlan(0.001, max(sizes), max(contexts), min(contexts), allowed_contexts=tuple(contexts))
    points = Points()

    def add(shapes: Sequence[Shape]) -> None:
        for shape in shapes:
            if not points.count(shape) and len(points.shapes()) < num_points:
                points.add(Sample(0, "grid", shape, shape.size, seconds(shape.size, shape.context_tokens)))

    first = [min(sizes, key=lambda size: abs(size - wish)) for wish in first_sizes]
    add([Shape("verify", size, contexts[at], 1) for at in (0, len(contexts) // 2, -1) for size in first])
    while len(points.shapes()) < num_points:
        gaps = choose(points, lambda requests: list(sizes), plan, stepped=False)
        if not gaps:
            break
        add(gaps[0][1])
    chosen = points.shapes()
    return Profile.from_points(
        [shape.size for shape in chosen],
        [seconds(shape.size, shape.context_tokens) for shape in chosen],
        [shape.context_tokens for shape in chosen],
        source=f"{len(chosen)} points chosen from a table",
    )
