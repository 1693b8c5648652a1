"""One round as text for a terminal: the tree, what came of it, and tables of what was left out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from selector.explain.account import Explanation, NodeAccount
from selector.explain.tokens import TokenNames, printable
from selector.replaying.caveats import what_if_sentence


def print_explanation(account: Explanation, names: TokenNames, out: Console) -> None:
    """Print the round: where it is, the tree, the outcome, the next candidates, the best siblings beside the target's path."""
    for line in headline(account, names):
        out.print(Text(line))
    out.print(_tree(account, names))
    for line in outcome(account, names):
        out.print(Text(line))
    shown = {node.path for node in account.left_out}
    out.print(_table("Next in the order of reach, left out", account.left_out, names))
    beside = [node for node in account.siblings if node.path not in shown]
    if beside:
        out.print(_table("Best left out beside the target's own path", beside, names))


def headline(account: Explanation, names: TokenNames) -> list[str]:
    """Where the round is and what it was chosen by."""
    number = account.round_number
    which = f"anchor {account.anchor}" if number is None else f"round {number} (anchor {account.anchor})"
    before = names.text([*account.context_token_ids, account.root_token_id], spaces=True)
    scaled = f", reach scaled by {account.reach_scale:.3f}" if account.reach_scale != 1 else ""
    caveats = [what_if_sentence(account.what_if)] if account.what_if else []
    return [
        f"{printable(account.key)}, {which}, {account.context_tokens} context tokens" + (f": …{before}" if before else ""),
        f"policy {account.policy} ({account.status}), {account.edges} probabilities{scaled}; "
        f"a second costs {account.price:.2f} tokens ({account.price_from}); {account.provenance} profile",
        *caveats,
        *account.notes,
    ]


def outcome(account: Explanation, names: TokenNames) -> list[str]:
    """What was expected, what came, and where the target left the tree."""
    came = len(account.committed_token_ids)
    seconds = account.round_seconds
    lines = [
        f"Expected {account.expected_tokens:.2f} tokens in {1e3 * seconds:.1f} ms ({account.expected_tokens / seconds:.1f} "
        f"tokens/s); came {came} ({came / seconds:.1f} tokens/s; a plain step {1 / account.plain_seconds:.1f})",
    ]
    said = ", ".join(names(token) for token in account.committed_token_ids)
    lines.append(f"Accepted {account.num_accepted} of {len(account.nodes)} nodes; the target said: {said}")
    left = account.divergence
    if left.token_id is None:
        lines.append(f"At depth {left.depth} {left.why}")
    else:
        place = "" if left.place is None else f", number {left.place} in the order, reach {left.reach:.4f}"
        lines.append(f"It left the tree at depth {left.depth} with {names(left.token_id)}{place}: {left.why}")
    return lines


def _tree(account: Explanation, names: TokenNames) -> Tree:
    root = Text.assemble((names(account.root_token_id), "bold"), ("  root", "dim"))
    tree = Tree(root, guide_style="dim")
    branches: dict[tuple[int, ...], Tree] = {(): tree}
    children: dict[tuple[int, ...], list[NodeAccount]] = {}
    for node in account.nodes:
        children.setdefault(node.path[:-1], []).append(node)
    wide = max((len(names(node.token_id)) for node in account.nodes), default=0)
    for node in account.nodes:  # parents first
        branches[node.path] = branches[node.path[:-1]].add(_line(node, names, wide))
    return tree


def _line(node: NodeAccount, names: TokenNames, wide: int) -> Text:
    style = "bold green" if node.accepted else ""
    mark = (" ✓ accepted", "green") if node.accepted else ("", "")
    place = f"{node.place}" if node.place is not None else "-"
    numbers = f"  reach {node.reach:.3f}  edge {node.edge_probability:.3f}  gain {node.gain:+.3f}"
    return Text.assemble((f"{place:>3} ", "dim"), (f"{names(node.token_id):<{wide}}", style), numbers, mark)


def _table(title: str, nodes: Sequence[NodeAccount], names: TokenNames) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("place", "candidate", "depth", "reach", "edge", "gain", "why"):
        table.add_column(name, justify="left" if name in ("candidate", "why") else "right", no_wrap=name != "why")
    for node in nodes:
        path = [names(token, 12) for token in node.path]
        shown = " ".join(path if len(path) <= 3 else ["…", *path[-2:]])
        style = "green" if node.accepted else ""
        table.add_row(
            str(node.place), Text(shown + (" ✓" if node.accepted else ""), style), str(node.depth), f"{node.reach:.4f}",
            f"{node.edge_probability:.3f}", f"{node.gain:+.4f}", Text(node.why or ""),
        )  # fmt: skip
    return table
