"""CUDA graphs: what a function launches, captured once and replayed over the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

Output = TypeVar("Output")

WARM_UP_RUNS = 2  # on a side stream before capturing, so that libraries have their workspaces


class Capture(Protocol[Output]):
    """Anything that captures a function as `capture_cuda` does."""

    def __call__(self, function: Callable[[], Output], /) -> tuple[Callable[[], Any], Output]:
        """The replay, and the output whose tensors every replay fills anew."""


def capture_cuda(function: Callable[[], Output]) -> tuple[Callable[[], Any], Output]:
    """Capture what `function` launches; returns the replay and the output whose tensors every replay fills anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return graph.replay, output
