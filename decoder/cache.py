"""A preallocated key/value cache that takes a whole tree of tokens and keeps one path of it, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from decoder.errors import TargetError


class TreeStore:
    """The buffers behind every layer: keys and values of shape (num_layers * num_requests, kv_heads, capacity, head width).

    Rows 0 .. length - 1 are committed; a forward writes its rows behind them, and they stay uncommitted until `commit`.
    One buffer for all layers makes a commit one indexed copy instead of one per layer. Requests of one batch lie side by
    side in a layer and are all of one length.
    """

    def __init__(self, num_layers: int, capacity: int, num_requests: int = 1) -> None:
        self.num_layers, self.capacity, self.num_requests = num_layers, capacity, num_requests
        self.length = self.written = 0
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` rows, by doubling; committed rows are kept."""
        if num_rows <= self.capacity:
            return
        while self.capacity < num_rows:
            self.capacity *= 2
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def forget(self) -> None:
        """Drop every row, committed or not."""
        self.length = self.written = 0

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros((*old.shape[:2], self.capacity, old.shape[3]))
        new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put (num_requests, kv_heads, t, width) rows behind the committed ones; returns views of everything visible."""
        end = self.length + keys.shape[2]
        if self.keys is None or self.values is None:
            self.keys = self._allocated(keys)
            self.values = self._allocated(values)
        requests = self.num_requests
        if (keys.shape[0], keys.shape[1], keys.shape[3]) != (requests, self.keys.shape[1], self.keys.shape[3]):
            raise TargetError(f"layer {layer} has keys of shape {tuple(keys.shape)}; every layer must have {requests} row(s) of "
                              f"{self.keys.shape[1]} heads of width {self.keys.shape[3]}")
        self.reserve(end)
        self.written = end
        here = slice(layer * requests, (layer + 1) * requests)
        self.keys[here, :, self.length:end] = keys
        self.values[here, :, self.length:end] = values
        return self.keys[here, :, :end], self.values[here, :, :end]

    def _allocated(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((self.num_layers * self.num_requests, like.shape[1], self.capacity, like.shape[3]))

    @torch.inference_mode()
    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows `sources` to rows `targets` in every layer; all are read before any is written."""
        if self.keys is None or self.values is None:
            raise TargetError("nothing has been written to the cache yet")
        from_rows = torch.tensor(sources, device=self.keys.device)
        to_rows = torch.tensor(targets, device=self.keys.device)
        for buffer in (self.keys, self.values):
            buffer.index_copy_(2, to_rows, buffer.index_select(2, from_rows))

    @torch.inference_mode()
    def move_each(self, sources: Sequence[Sequence[int]], first: int) -> None:
        """Copy rows `sources[i]` of request i, as many for each, to the rows from `first` on, in every layer."""
        if self.keys is None or self.values is None:
            raise TargetError("nothing has been written to the cache yet")
        rows = torch.tensor(sources, device=self.keys.device).repeat(self.num_layers, 1)  # (layers * requests, n)
        for buffer in (self.keys, self.values):
            index = rows[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
            buffer[:, :, first:first + rows.shape[1]] = buffer.gather(2, index)


class TreeLayer(CacheLayerMixin):
    """One layer's window on the store, in the form transformers expects (4.57 and 5.x)."""

    is_sliding = False

    def __init__(self, store: TreeStore, index: int) -> None:
        super().__init__()
        self.store, self.index = store, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Nothing to do: the store allocates at its first write."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the forward's rows, uncommitted, and return all keys and values up to them."""
        return self.store.write(self.index, key_states, value_states)

    def get_seq_length(self, *args: Any) -> int:
        """Committed tokens."""
        return self.store.length

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Keys a query sees and their offset; `query` is a length (5.x) or the cache positions (4.57)."""
        num_queries = query if isinstance(query, int) else query.shape[0]
        return self.store.length + num_queries, 0

    def get_max_cache_shape(self) -> int:
        """No maximum: the store grows."""
        return -1

    def get_max_length(self) -> int:
        """No maximum: the store grows."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.store.forget()


class TreeCache(Cache):
    """Keys and values of one request, or of a batch of requests that are all of one length.

    A target forward appends its rows; `commit(slots)` then keeps the accepted path: the row of `slots[k]` moves to
    position length + k, rows already in place are not touched, and everything behind is given up.
    """

    def __init__(self, num_layers: int, capacity: int = 1024, num_requests: int = 1) -> None:
        if num_layers < 1 or capacity < 1 or num_requests < 1:
            raise ValueError(f"layers, capacity and requests must be positive, got {num_layers}, {capacity}, {num_requests}")
        self.store = TreeStore(num_layers, capacity, num_requests)
        super().__init__(layers=[TreeLayer(self.store, index) for index in range(num_layers)])

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.store.length

    @property
    def capacity(self) -> int:
        """Rows that fit before the buffers grow."""
        return self.store.capacity

    @property
    def num_requests(self) -> int:
        """Requests of the batch."""
        return self.store.num_requests

    def reset(self) -> None:
        """Forget all tokens; the buffers stay."""
        self.store.forget()

    def commit(self, slots: Sequence[int]) -> int:
        """Keep the rows of `slots` (ascending, as on a path of a tree) of the last forward; returns rows moved.

        In a batch every request keeps the same slots; `commit_each` takes a path for each.
        """
        slots, length = self._checked(slots), self.store.length
        moving = [(length + slot, length + place) for place, slot in enumerate(slots) if slot != place]
        if moving:
            self.store.move([source for source, _ in moving], [target for _, target in moving])
        self.store.length = self.store.written = length + len(slots)
        return len(moving)

    def commit_each(self, slots: Sequence[Sequence[int]]) -> None:
        """Keep the rows of `slots[i]` of request i: a path per request, all equally long."""
        paths = [self._checked(path) for path in slots]
        if len(paths) != self.num_requests or len({len(path) for path in paths}) != 1:
            raise ValueError(f"{self.num_requests} equally long paths are needed, got {[len(path) for path in paths]}")
        length = self.store.length
        self.store.move_each([[length + slot for slot in path] for path in paths], length)
        self.store.length = self.store.written = length + len(paths[0])

    def _checked(self, slots: Sequence[int]) -> list[int]:
        slots = [int(slot) for slot in slots]
        if any(later <= earlier for earlier, later in zip(slots, slots[1:], strict=False)) or (slots and slots[0] < 0):
            raise ValueError(f"slots must be ascending and not negative, got {slots}")
        if slots and self.store.length + slots[-1] >= self.store.written:
            rows = self.store.written - self.store.length
            raise ValueError(f"slot {slots[-1]} was not forwarded: the last forward had {rows} rows")
        return slots

    def commit_first(self, num_rows: int) -> None:
        """Keep the first `num_rows` rows of the last forward, as after a prompt: nothing moves."""
        if self.store.length + num_rows > self.store.written:
            raise ValueError(f"{num_rows} rows were not forwarded")
        self.store.length += num_rows

    def undo(self, num_tokens: int) -> None:
        """Give up the last `num_tokens` committed tokens (for measuring; their rows are overwritten later)."""
        if not 0 <= num_tokens <= self.store.length:
            raise ValueError(f"cannot undo {num_tokens} of {self.store.length} tokens")
        self.store.length -= num_tokens
        self.store.written = self.store.length

    @torch.inference_mode()
    def copy_prefix(self, source: TreeCache, num_tokens: int) -> None:
        """Become the first `num_tokens` committed tokens of another cache of the same model, in every request (for measuring)."""
        keys, values = source.store.keys, source.store.values
        if num_tokens > source.length:
            raise ValueError(f"the other cache holds {source.length} tokens, {num_tokens} were asked for")
        self.store.forget()
        if num_tokens == 0 or keys is None or values is None:
            return
        if source.num_requests != 1:
            raise ValueError(f"a prefix is copied from one request, the other cache holds {source.num_requests}")
        for layer in range(self.store.num_layers):
            rows = [buffer[layer:layer + 1, :, :num_tokens].expand(self.num_requests, -1, -1, -1) for buffer in (keys, values)]
            self.store.write(layer, *rows)
        self.commit_first(num_tokens)
