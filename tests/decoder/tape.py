"""What a CUDA graph would hold, noted on any device: the operations of a call, run again over the same tensors.

As in a graph, whatever Python decided while the operations were noted stays decided, and every replay overwrites the same
outputs. As a capture would, `found` names whatever the host would have to wait for or to copy.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Output = TypeVar("Output")
MASKS = (torch.bool, torch.uint8)
BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
FROM_PYTHON = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.Tensor.new_tensor)
TO_PYTHON = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.item)


def tensors(*parts: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


class _PythonValues(TorchFunctionMode):
    """Names calls that move values between Python and tensors."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FROM_PYTHON or func in TO_PYTHON:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Notes every operation while it is entered; `device` is where all of their tensors must be."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = torch.device(device)
        self.found: list[str] = []
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self._python = _PythonValues(self.found)

    def __enter__(self) -> Tape:
        super().__enter__()
        self._python.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._python.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        by_mask = any(each.dtype in MASKS for each in tensors(args[1:]))
        by_number = func is torch.ops.aten.index.Tensor and not by_mask  # tagged for its masks; numbers fix its shape
        if any(tag in func.tags for tag in BY_VALUE) and not by_number:
            self.found.append(str(func))
        if func.overloadpacket.__name__ == "index_put_" and by_mask:
            self.found.append(f"{func} by a mask")
        elsewhere = {each.device.type for each in tensors(args, kwargs, out)} - {self.device.type}
        if elsewhere:
            self.found.append(f"{func} on {', '.join(elsewhere)}")
        self.steps.append((func, args, kwargs, out))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        """Run what was noted again, over the same tensors."""
        for func, args, kwargs, out in self.steps:
            for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor done in place
                    old.copy_(new)


def capture_on_tape(function: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
    """As `decoder.capture.capture_cuda`; a RuntimeError where that would raise one."""
    with Tape() as tape:
        output = function()
    if tape.found:
        raise RuntimeError(f"cannot be captured: {', '.join(sorted(set(tape.found)))}")
    return tape.replay, output
