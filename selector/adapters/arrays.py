"""What all adapters share: a checked tree from a parent array, parents from a mask, arrays of the caller's kind."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selector.adapters.errors import AdapterError
from selector.tree import DraftTree

GIVEN = "given"  # status of a tree that came from elsewhere: nothing is known about how it was chosen


def host_array(values: Any, dtype: type) -> NDArray[Any]:
    """A numpy copy of a list, an array, or a torch tensor of any device; raises AdapterError for what is no such array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    try:
        return np.array(values, dtype)
    except (TypeError, ValueError) as error:
        raise AdapterError(f"cannot be read as an array of {np.dtype(dtype)}: {values!r} ({error})") from error


def as_kind_of(array: NDArray[Any], like: Any, same_device: bool = True) -> Any:
    """The array as it is, or as a torch tensor if `like` is one (on its device, or on the processor)."""
    if not hasattr(like, "detach"):
        return array
    tensor = sys.modules["torch"].from_numpy(np.ascontiguousarray(array))
    return tensor.to(like.device) if same_device else tensor


def tree_from_parents(
    token_ids: ArrayLike, parents: ArrayLike, reach: ArrayLike | None = None, status: str = GIVEN
) -> DraftTree:
    """A tree from its slots' tokens and parents, slot 0 being the root.

    Args:
        token_ids: (t,). parents: (t,) slots, -1 for the root, every other before its children.
        reach: (t,) if known; NaN else, as engines' layouts do not carry it.

    Raises AdapterError naming the first slot at fault.
    """
    ids, up = host_array(token_ids, np.int64), host_array(parents, np.int32)
    t = up.size
    if up.shape != (t,) or ids.shape != (t,) or t == 0:
        raise AdapterError(f"token_ids and parents must be (t,) with t at least 1, got {ids.shape} and {up.shape}")
    bad = np.flatnonzero((up < 0) | (up >= np.arange(t)))
    if up[0] != -1 or bad.tolist() != [0]:
        slot = int(bad[bad > 0][0]) if (bad > 0).any() else 0
        raise AdapterError(f"slot {slot} has parent {up[slot]}; slot 0 must have -1 and every other an earlier slot")
    depths, seen = np.zeros(t, np.int32), set()
    for slot in range(1, t):
        depths[slot] = depths[up[slot]] + 1
        edge = (int(up[slot]), int(ids[slot]))
        if edge in seen:
            raise AdapterError(f"slot {slot} repeats token {edge[1]} under parent {edge[0]}")
        seen.add(edge)
    known = np.full(t, np.nan) if reach is None else host_array(reach, np.float64)
    if known.shape != (t,):
        raise AdapterError(f"reach must be ({t},) as the tokens are, got {known.shape}")
    known[0] = 1.0
    return DraftTree(ids, up, depths, known, status)


def parents_from_mask(mask: Any) -> NDArray[np.int32]:
    """(t,) parents from a (t, t) ancestors-and-self mask: the latest other slot a row sees; -1 where there is none.

    Raises AdapterError if the mask is not that of the tree it describes.
    """
    seen = host_array(mask, np.bool_)
    if seen.ndim != 2 or seen.shape[0] != seen.shape[1] or not seen.diagonal().all():
        raise AdapterError(f"a tree mask is (t, t) with a full diagonal, got shape {seen.shape}")
    above = np.tril(seen, -1)
    columns = np.arange(len(seen))
    parents = np.where(above, columns, -1).max(axis=1).astype(np.int32)
    for row, parent in enumerate(parents.tolist()):
        expected = seen[parent] | (columns == row) if parent >= 0 else columns == row
        if not np.array_equal(seen[row], expected):
            raise AdapterError(f"row {row} of the mask does not show exactly slot {row}, its parent {parent} and that one's row")
    return parents


def require_equal(name: str, found: Any, expected: NDArray[Any]) -> None:
    """Raise AdapterError unless a redundant array says what the parents say."""
    values = host_array(found, expected.dtype.type)
    if not np.array_equal(values, expected):
        raise AdapterError(f"{name} contradicts the parents: found {values.tolist()}, expected {expected.tolist()}")
