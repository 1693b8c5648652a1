"""CUDA graphs of target forwards, one per size: captured once, replayed with new tokens, padded to the next size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from costmodel.errors import SizeNotExecutable
from decoder.cache import TreeCache
from decoder.capture import Capture, capture_cuda
from decoder.errors import TargetError, UsageError
from decoder.target import Target, TargetOutput

DEFAULT_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Verify tokens captured unless told otherwise: as serving engines lay them out."""


@dataclass
class _Captured:
    """One graph: the tensors it reads, the call that replays it, and the output it fills."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    replay: Callable[[], Any]
    output: TargetOutput


class CapturedForwards:
    """`Target.forward_batch` as replayed graphs: one per captured size at the cache's context and batch.

    A graph holds the addresses of the cache's buffers, so all of them are dropped when these move.
    """

    def __init__(self, target: Target, sizes: Sequence[int] = DEFAULT_SIZES,
                 capture: Capture[TargetOutput] | None = None) -> None:
        if capture is None and target.device.type != "cuda":
            raise UsageError(f"mode captured needs CUDA graphs, and the target is on {target.device.type}",
                             hint="add --device cuda, or use --mode eager")
        if not sizes or min(sizes) < 1:
            raise UsageError(f"captured sizes must be positive, got {list(sizes)}")
        self.target, self.sizes = target, sorted(set(sizes))
        self.capture: Capture[TargetOutput] = capture or capture_cuda
        self.num_replays = 0
        self._graphs: dict[tuple[int, int, int], _Captured] = {}
        self._buffers: tuple[int, int] | None = None

    def padded(self, num_verify_tokens: int, num_requests: int) -> int:
        """The rows that run for so many: the next captured size that the batch shares evenly.

        Raises SizeNotExecutable where there is none.
        """
        for size in self.sizes:
            if size >= num_verify_tokens and size % num_requests == 0:
                return size
        raise SizeNotExecutable(f"no graph of at least {num_verify_tokens} verify tokens for {num_requests} requests: "
                                f"the largest size is {self.sizes[-1]}")

    def forget(self) -> None:
        """Drop every graph, and with them their hold on the cache they were captured over."""
        self._graphs.clear()
        self._buffers = None

    def make_ready(self, slots: int, cache: TreeCache) -> None:
        """Capture the graph of `slots` rows a request behind this cache, unless there is one. Not timed."""
        if cache.store.keys is None:
            raise TargetError("nothing has been written to the cache yet, so there is nothing to capture over")
        cache.store.reserve(cache.length + slots)
        buffers = (cache.store.keys.data_ptr(), id(cache))
        if buffers != self._buffers:
            self.forget()
            self._buffers = buffers
        key = (cache.length, cache.num_requests, slots)
        if key not in self._graphs:
            self._graphs[key] = self._captured(slots, cache)

    @torch.inference_mode()
    def _captured(self, slots: int, cache: TreeCache) -> _Captured:
        device, requests, length = self.target.device, cache.num_requests, cache.length
        ids = torch.zeros(requests, slots, dtype=torch.long, device=device)
        positions = torch.full_like(ids, length)
        mask = None if slots == 1 else torch.ones(requests, 1, slots, length + slots, dtype=torch.bool, device=device)
        try:
            replay, output = self.capture(lambda: self.target.forward_batch(ids, positions, cache, mask))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise TargetError(f"a forward of {requests * slots} rows cannot be captured: {reason}",
                              hint="a model whose forward waits for the device cannot be: use --mode eager") from error
        return _Captured(ids, positions, mask, replay, output)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: TreeCache, mask: torch.Tensor | None) -> TargetOutput:
        """As `Target.forward_batch`, for a size that is ready; the output is overwritten by the next replay."""
        graph = self._graphs[cache.length, cache.num_requests, ids.shape[1]]
        graph.ids.copy_(ids)
        graph.positions.copy_(positions)
        if graph.mask is not None and mask is not None:
            graph.mask.copy_(mask)
        graph.replay()
        self.num_replays += 1
        cache.store.written = cache.length + ids.shape[1]
        return graph.output
