"""The search as one CUDA graph: captured for one shape of logits, replayed with whatever values come."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.capture import Capture, capture_cuda
from decoder.device.search import DeviceScorer, check_search, search_on_device
from decoder.device.tables import DeviceTrees
from decoder.errors import UsageError


class CapturedSearch:
    """`search_on_device` as a replayed CUDA graph: one launch a round instead of some hundred.

        curve = torch.from_numpy(np.array(cost.round_seconds(65, context_tokens)))      # cost: a costmodel.CostModel
        search = CapturedSearch((num_requests, depth, vocab), 64, "exact", round_seconds=curve)
        trees = search(draft_logits, root_tokens)                                       # every round
        trees.token_ids, trees.position_ids(context_lengths), trees.attention_mask      # for the target's forward
        slots, num_accepted = trees.walk(target_tokens, depth)

    The graph reads `logits`, `root_tokens`, `price` and `round_seconds`. A drafter may write its logits straight into the
    first; what is given to a call is copied there. All requests share the shape: R trees of at most `max_nodes` nodes.

    Attributes:
        logits: (R, depth, vocab). root_tokens: (R,) int64. price: () float64. round_seconds: (N + 1,) float64, or None
            for the policy "fixed". All on the device.

    Raises UsageError off CUDA, PolicyError as `search_on_device`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        max_nodes: int,
        policy: str = "fixed",
        *,
        round_seconds: Tensor | None = None,
        price: float = 0.0,
        top_k: int = 16,
        bonus: float = 1.0,
        scorer: DeviceScorer | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cuda",
        capture: Capture[DeviceTrees] | None = None,
    ) -> None:
        if capture is None and torch.device(device).type != "cuda":
            raise UsageError(f"a captured search needs CUDA graphs, and the device is {device}", hint="use search_on_device")
        check_search(policy, round_seconds is not None, scorer is not None, has_roots=True)
        self.logits = torch.zeros(shape, dtype=dtype, device=device)
        self.root_tokens = torch.full((shape[0],), -1, dtype=torch.int64, device=device)
        self.price = torch.full((), price, dtype=torch.float64, device=device)
        self.round_seconds = None if round_seconds is None else round_seconds.to(device, torch.float64, copy=True)

        def search() -> DeviceTrees:
            return search_on_device(
                self.logits, max_nodes, policy, self.round_seconds, self.price, top_k, self.root_tokens, bonus, scorer
            )

        with torch.inference_mode():
            search()  # puts a scorer's weights on the device: a copy from the host cannot be captured
            self._replay, self._trees = (capture or capture_cuda)(search)

    @torch.inference_mode()
    def __call__(
        self,
        logits: Tensor | None = None,
        root_tokens: Tensor | None = None,
        price: Tensor | float | None = None,
        round_seconds: Tensor | None = None,
    ) -> DeviceTrees:
        """The trees, in tensors that the next call fills anew; what is not given stays as it was."""
        if logits is not None:
            self.logits.copy_(logits)
        if root_tokens is not None:
            self.root_tokens.copy_(root_tokens)
        if isinstance(price, Tensor):
            self.price.copy_(price)
        elif price is not None:
            self.price.fill_(price)
        if round_seconds is not None:
            if self.round_seconds is None:
                raise UsageError("the policy 'fixed' reads no round_seconds")
            self.round_seconds.copy_(round_seconds)
        self._replay()
        return self._trees
