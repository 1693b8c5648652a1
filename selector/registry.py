"""Policies by name: what a command line, a plan or a caller may ask for."""

from __future__ import annotations

from collections.abc import Callable

from selector.errors import PolicyError
from selector.policies import ByCost, FixedShape, Plain, Policy
from selector.smart import Smart
from selector.taps import Taps


def _no_argument(name: str, policy: Policy) -> Callable[[int | None], Policy]:
    def make(argument: int | None) -> Policy:
        if argument is not None:
            raise PolicyError(f"policy {name!r} takes no number, got {argument}")
        return policy

    return make


def _fixed(argument: int | None) -> Policy:
    if argument is None:
        raise PolicyError("policy 'fixed' needs a number of nodes", hint="write for example fixed:8")
    return FixedShape("fixed", argument)


REGISTRY: dict[str, Callable[[int | None], Policy]] = {
    "plain": _no_argument("plain", Plain()),
    "chain": lambda argument: FixedShape("chain", argument),
    "fixed": _fixed,
    "unimodal": _no_argument("unimodal", ByCost("unimodal")),
    "exact": _no_argument("exact", ByCost("exact")),
    "priced": _no_argument("priced", ByCost("priced")),
    "taps": lambda argument: Taps() if argument is None else Taps(argument, max(argument, Taps.pool_nodes)),
    "smart": lambda argument: Smart() if argument is None else Smart(argument),
}
"""Policy name -> factory of its optional number."""

POLICY_NAMES = ("plain", "chain", "chain:N", "fixed:N", "unimodal", "exact", "priced", "taps", "taps:N", "smart", "smart:P")


def parse_policy(text: str) -> Policy:
    """A policy from its name, such as `priced`, `chain:4` or `fixed:16`; raises PolicyError for anything else."""
    name, colon, number = text.strip().partition(":")
    if name not in REGISTRY:
        raise PolicyError(f"unknown policy {text!r}; allowed are {', '.join(POLICY_NAMES)}")
    if not colon:
        return REGISTRY[name](None)
    if not number.isascii() or not number.isdigit() or int(number) < 1:
        raise PolicyError(f"policy {text!r}: what follows the colon must be a whole number of at least 1")
    return REGISTRY[name](int(number))
