"""The live loop: draft, select, verify, commit; one target forward per round, the root never forwarded twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from decoder.drafters.base import Drafter
from decoder.errors import UsageError
from decoder.records import Generation, Round, StageClock
from decoder.sampling import Sampling, TokenChooser
from decoder.target import Target
from decoder.verify import RootTree, Verified, verify_tree

OnTokens = Callable[[list[int]], None]


class Decoder:
    """Generates with a target, a drafter and a selector; without the last two, or with policy `plain`, step by step.

    One decoder serves requests one after the other: cache buffers and what the selector has learned live on, everything
    else starts afresh. Plain decoding runs through the same forward, cache and loop.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, selector: Any = None, *, cache: Any = None,
                 keep_logits: bool = False) -> None:
        if drafter is not None and selector is None:
            raise UsageError("a drafter needs a selector that picks the trees")
        if selector is not None and selector.drafts and drafter is None:
            raise UsageError("the selector's policy drafts, but there is no drafter")
        self.target, self.selector = target, selector
        self.drafter = drafter if selector is not None and selector.drafts else None
        self.cache = cache if cache is not None else target.new_cache()
        self.keep_logits = keep_logits

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int = 128, *, temperature: float = 0.0, seed: int = 0,
                 top_k: int | None = None, top_p: float | None = None, stop_ids: frozenset[int] | set[int] | None = None,
                 on_tokens: OnTokens | None = None) -> Generation:
        """Continue `prompt_ids` by at most `max_new_tokens` tokens, ending at the first stop token (which is kept).

        `on_tokens` gets every round's tokens in order, nothing beyond the end. Raises UsageError for an empty prompt or
        a limit below 1, ContextError where prompt and limit exceed the target's context, LogitsError for NaN.
        """
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self._check_prompt(prompt_ids, max_new_tokens)
        chooser = TokenChooser(Sampling(temperature, top_k, top_p, seed))
        stops = self.target.stop_ids if stop_ids is None else stop_ids
        return _Request(self, chooser, stops, max_new_tokens, on_tokens).run(list(prompt_ids))

    def _check_prompt(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        if len(prompt_ids) == 0:
            raise UsageError("the prompt is empty")
        vocab = self.target.embed.shape[0]
        outside = [token for token in prompt_ids if not 0 <= token < vocab]
        if outside:
            raise UsageError(f"prompt token {outside[0]} is outside the vocabulary of {vocab}")
        self.target.check_context(len(prompt_ids), max_new_tokens)


class _Request:
    """One request's state: the root, what was emitted, and features the drafter has not taken over yet."""

    def __init__(self, decoder: Decoder, chooser: TokenChooser, stop_ids: frozenset[int] | set[int], max_new_tokens: int,
                 on_tokens: OnTokens | None) -> None:
        self.target, self.cache = decoder.target, decoder.cache
        self.drafter, self.selector = decoder.drafter, decoder.selector
        self.keep_logits = decoder.keep_logits
        self.chooser, self.stop_ids, self.max_new_tokens, self.on_tokens = chooser, stop_ids, max_new_tokens, on_tokens
        self.pending: list[torch.Tensor] = []
        self.drafts_next = False
        self.done = False

    def run(self, prompt_ids: list[int]) -> Generation:
        self.result = Generation(len(prompt_ids))
        self._prefill(prompt_ids)
        while not self.done:
            self._round()
        return self.result

    def _prefill(self, prompt_ids: list[int]) -> None:
        """Forward the prompt; the token after it is the first root."""
        layers = self.drafter.feature_layers if self.drafter is not None else ()
        if self.target.feature_layers != tuple(layers):
            self.target.set_feature_layers(layers)
        clock = StageClock(self.target.synchronize)
        self.cache.reset()
        output = self.target.forward(prompt_ids, range(len(prompt_ids)), self.cache, logits_rows=slice(-1, None))
        self.root = self.chooser.prepare(output.logits).token(0)
        if self.keep_logits:
            self.result.logits.append(output.logits)
        self.cache.commit_first(len(prompt_ids))
        if self.drafter is not None:
            self.drafter.start()
            self._keep(output.features)
            self.drafts_next = self.selector.drafts_next(self.cache.length)
            if self.drafts_next:
                self._extend_drafter(self.drafter)
        clock.stage("other")
        self.result.prefill_seconds = clock.total()
        self._emit([self.root], clock)

    def _round(self) -> None:
        clock = StageClock(self.target.synchronize)
        context = self.cache.length
        remaining = self.max_new_tokens - len(self.result.token_ids)
        tree: Any = RootTree()
        drafted = self.drafts_next and remaining > 1
        if drafted:
            tree = self._draft_tree(self.drafter, context, remaining - 1, clock)
        verified = verify_tree(self.target, self.cache, tree, self.root, self.chooser)
        clock.stage("verify")
        self.cache.commit(verified.slots)
        self._keep(verified.features)
        if self.keep_logits:
            self.result.logits.append(verified.logits[verified.slots] if tree.num_nodes else verified.logits)
        clock.stage("commit")
        self.root = verified.token_ids[-1]
        num_emitted = self._emit(verified.token_ids, clock)
        self._observe(tree, verified, drafted, clock)
        seconds = {f"{stage}_seconds": value for stage, value in clock.seconds.items()}
        self.result.rounds.append(Round(context, drafted, tree.num_nodes, verified.num_accepted, num_emitted, **seconds))

    def _draft_tree(self, drafter: Any, context: int, max_depth: int, clock: StageClock) -> Any:
        """Draft and select; nothing deeper than the tokens still wanted, since the bonus token comes on top."""
        self._extend_drafter(drafter)
        logits = drafter.draft(self.root, context)[:max_depth]
        clock.stage("draft")
        tree = self.selector.select(logits, context, root_token=self.root)
        clock.stage("select")
        return tree

    def _keep(self, features: torch.Tensor | None) -> None:
        if self.drafter is not None and features is not None:
            self.pending.append(features)

    def _extend_drafter(self, drafter: Any) -> None:
        """Hand over the features of every token committed since the last draft."""
        if self.pending:
            drafter.extend(torch.cat(self.pending) if len(self.pending) > 1 else self.pending[0])
            self.pending.clear()

    def _emit(self, token_ids: list[int], clock: StageClock) -> int:
        """Append tokens up to the limit or the first stop token; returns how many."""
        kept = token_ids[: self.max_new_tokens - len(self.result.token_ids)]
        stop = next((place for place, token in enumerate(kept) if token in self.stop_ids), None)
        if stop is not None:
            kept = kept[: stop + 1]
            self.result.finish_reason = "stop"
        self.result.token_ids.extend(kept)
        self.done = stop is not None or len(self.result.token_ids) >= self.max_new_tokens
        clock.stage("other")
        if self.on_tokens is not None:
            self.on_tokens(list(kept))
            clock.exclude()
        return len(kept)

    def _observe(self, tree: Any, verified: Verified, drafted: bool, clock: StageClock) -> None:
        """Let the selector learn from what the round cost and gave."""
        if self.selector is not None:
            if drafted:
                self.selector.observe(tree, verified.num_accepted, clock.total(), verified.token_ids)
            else:
                self.selector.observe_plain(clock.total())
        if self.drafter is not None:
            self.drafts_next = bool(self.selector.drafts_next(self.cache.length))
        clock.stage("other")
