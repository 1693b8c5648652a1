"""What can be timed: the protocol an engine implements, and how one is found by name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from costmodel.errors import BackendNotFound
from costmodel.identity import Identity

GROUP = "treebudget.backends"


@runtime_checkable
class Backend(Protocol):
    """An engine that the profiler can time. It leaves its cache as it found it: nothing it times is committed for good.

    Every call may return before the device is done; `synchronize` waits for it. The numbers returned say what was really
    executed, and the profiler refuses a backend that executes something else than it was asked for.

    Attributes that a backend may have beside these, each used where it is there:
        make_ready(stage, size): gets the next call ready (inputs drawn, a graph captured, other ranks told); not timed.
        executable_verify_tokens: the sizes a captured or padded engine runs.
        num_target_forwards: a counter that rises with every verify. verify_token_ids: the ids last verified.
        draft_block_sizes: block sizes beside its own at which `draft(size)` can be timed.
        notes: sentences the profile should carry.
        rank, lead(), follow(), close(): several processes of one engine; rank 0 times what `lead()` returns and closes it,
        the others `follow()`.
    """

    identity: Identity

    def prepare(self, context_tokens: int, num_requests: int = 1) -> None:
        """Make a cache of that context for each of the requests; what follows runs there. Not timed."""

    def verify(self, num_verify_tokens: int) -> int:
        """One target forward over real trees of that many slots in all, not committed; returns the rows executed.

        The requests of a batch share them evenly.
        """

    def draft(self) -> int:
        """Draft for every request at the prepared context; returns the block size, or 0 where there is no drafter."""

    def select(self, num_nodes: int) -> int:
        """From draft logits to trees of that many nodes in all; returns the nodes."""

    def commit(self, num_tokens: int) -> int:
        """Move that many accepted slots of every request to follow the context, and undo it; returns that number."""

    def synchronize(self) -> None:
        """Wait until the device has done everything asked so far."""


def backend_names() -> list[str]:
    """Names of the installed backends, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def create_backend(name: str, **options: Any) -> Backend:
    """Load the entry point `name` of the group `treebudget.backends` and call it with `options`.

    The command line passes target, drafter, dtype, device and threads always, and linear, random_weights, tensor_parallel,
    mode and captured_sizes where they were asked for. Raises BackendNotFound that lists what there is.
    """
    found = [point for point in entry_points(group=GROUP) if point.name == name]
    if not found:
        raise BackendNotFound(
            f"no backend is called {name!r}", hint=f"installed: {', '.join(backend_names()) or 'none (is treebudget installed?)'}"
        )
    return found[0].load()(**options)
