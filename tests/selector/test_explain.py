from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from costmodel import CostModel
from costmodel.clitools import to_jsonable
from costmodel.identity import Identity
from selector.explain import ExplainError, explain
from selector.explain.picture import draw_explanation, drawn_nodes, layout
from selector.explain.terminal import headline, print_explanation
from selector.explain.tokens import TokenNames, load_names, tokenizer_file
from selector.figures import FigureError
from selector.plan import Plan
from selector.registry import parse_policy
from selector.replaying.orders import build_orders
from selector.replaying.rounds import build_curves, play
from selector.trace import Trace, TraceText
from tests.selector.helpers import markov_trace

POLICIES = ("chain", "chain:2", "fixed:1", "fixed:6", "unimodal", "exact", "priced", "taps", "smart", "plain")


def cost_model(slope: float = 0.01) -> CostModel:
    return CostModel.from_points([1, 2, 3, 17], [0.05, 0.05 + slope, 0.05 + 2 * slope, 0.05 + 16 * slope], draft_seconds=0.01)


def worked_trace() -> Trace:
    """One text 7 | 10 20 30: at the first anchor 20 (.6) or 21 (.3), then 31 (.5) or 30 (.2)."""
    ids = np.array([[[20, 21], [31, 30]], [[30, 31], [1, 2]], [[1, 2], [1, 2]]], np.int32)
    chances = np.array([[[0.6, 0.3], [0.5, 0.2]]] * 3)
    return Trace({"target": "toy"}, [TraceText("one", None, 1, np.array([7, 10, 20, 30], np.int32), ids, np.log(chances))])


def test_a_worked_example():
    account = explain(worked_trace(), cost_model(), "priced", price=20.0)  # a node costs 10 ms, that is 0.2 tokens
    # Order: 20 (.6), then 21 and 20-31 (.3 each), 21-31 (.15), 20-30 (.12), 21-30 (.06). Above .2 there are three.
    assert sorted(node.path for node in account.nodes) == [(20,), (20, 31), (21,)]
    first = account.nodes[0]
    assert (first.reach, first.edge_probability, first.accepted) == (pytest.approx(0.6), pytest.approx(0.6), True)
    assert first.marginal_seconds == pytest.approx(0.01)
    assert first.gain == pytest.approx(0.4)
    assert [node.path for node in account.left_out] == [(21, 31), (20, 30), (21, 30)]
    assert account.left_out[0].gain == pytest.approx(0.15 - 0.2)
    assert account.left_out[0].why == "it would bring 0.150 tokens and take time worth 0.200"
    assert account.left_out[1].why == "the 2 up to it would bring 0.270 tokens and take time worth 0.400"
    assert account.num_accepted == 1
    assert account.committed_token_ids == [20, 30]
    assert account.expected_tokens == pytest.approx(1 + 0.6 + 0.3 + 0.3)
    assert account.round_seconds == pytest.approx(0.01 + 0.05 + 0.03)
    left = account.divergence
    assert (left.depth, left.token_id, left.listed, left.place) == (2, 30, True, 5)
    assert left.reach == pytest.approx(0.12)
    assert [node.path for node in account.siblings] == [(20, 30)]
    assert account.siblings[0].accepted


def test_where_the_target_goes_is_said_in_every_case():
    trace = worked_trace()
    trace.texts[0].token_ids[3] = 99  # never listed
    assert explain(trace, cost_model(), "fixed:9").divergence.why == "the drafter did not list it"
    end = explain(worked_trace(), cost_model(), "fixed:9", anchor=1)
    assert end.divergence.token_id is None and end.divergence.why == "the text ends here"
    whole = explain(worked_trace(), cost_model(), "fixed:9", anchor=0)
    assert whole.divergence.why == "the whole draft was right: it ends here"
    chain = explain(worked_trace(), cost_model(), "chain")
    assert {node.why for node in chain.left_out} == {"not among the chain's 2 nodes"}
    assert {node.why for node in explain(worked_trace(), cost_model(), "fixed:1").left_out} == {"the budget is 1 nodes"}
    assert {node.why for node in explain(worked_trace(), cost_model(), "plain").left_out} == {"plain decoding drafts nothing"}
    cut = explain(worked_trace(), cost_model(0.0001), "exact", max_nodes=2)
    assert all("at most" in str(node.why) for node in cut.left_out)


@pytest.mark.parametrize("name", POLICIES)
def test_rounds_are_those_of_replay(name):
    trace, cost = markov_trace(num_texts=3, length=20), cost_model()
    price = 18.0 if name == "priced" else None
    single = build_orders(trace.select([1]), 16)
    curves = build_curves(single, cost)
    if name in ("taps", "smart"):
        from selector.replaying.playing import play_any

        rounds = play_any(parse_policy(name), single, curves)
    else:
        rounds = play(parse_policy(name), single, curves, price=18.0, adapt=False)
    for number, anchor in enumerate(rounds.visited.tolist()):
        account = explain(trace, cost, name, text="text-1", round_number=number, price=price)
        assert (account.anchor, account.round_number) == (anchor, number)
        assert (len(account.nodes), account.num_accepted) == (rounds.nodes[number], rounds.accepted[number])
        assert account.round_seconds == pytest.approx(rounds.seconds[number])  # of plain decoding, a step that drafts nothing
    with pytest.raises(ExplainError, match=f"rounds 0 to {number}"):
        explain(trace, cost, name, text=1, round_number=number + 1, price=price)


@pytest.mark.parametrize("name", ["exact", "priced"])
def test_the_account_adds_up(name):
    trace, cost = markov_trace(num_texts=3, length=20, overconfident=1.0), cost_model(0.003)
    plan = Plan(name, price=15.0, reach_scale=0.8)
    for anchor in range(0, 19, 3):
        account = explain(trace, cost, name, text=2, anchor=anchor, plan=plan)
        reach = {node.path: node.reach for node in (*account.nodes, *account.left_out, *account.siblings)}
        for path, value in reach.items():
            assert path[:-1] == () or value <= reach.get(path[:-1], 1.0) + 1e-12
        assert account.expected_tokens == pytest.approx(1 + 0.8 * sum(node.reach for node in account.nodes))
        gains = sum(node.gain for node in account.nodes)
        spent = account.price * sum(node.marginal_seconds for node in account.nodes)
        assert gains == pytest.approx(account.expected_tokens - 1 - spent)
        places = [node.place for node in (*account.nodes, *account.left_out)]
        assert places == list(range(1, len(places) + 1))  # prefixes of the order of reach
        running = np.cumsum([node.gain for node in account.left_out])
        assert (running <= 1e-9).all()  # no larger tree is worth more: that is what optimal means
        assert account.price_from == ("the plan" if name == "priced" else "what the tree is expected to yield per second")


def test_the_price_of_a_whole_trace_is_replays():
    trace, cost = markov_trace(num_texts=3, length=20), cost_model()
    account = explain(trace, cost)
    assert account.price_from == "replay's fixed point on this trace"
    orders = build_orders(trace, 16)
    assert account.price == pytest.approx(play(parse_policy("priced"), orders, build_curves(orders, cost)).price)


def test_what_was_asked_wrongly_is_said():
    trace, cost = markov_trace(num_texts=2, length=12), cost_model()
    for text in ("\u00b2", "--5"):
        with pytest.raises(ExplainError, match="no text"):
            explain(trace, cost, text=text)
    with pytest.raises(ExplainError, match="holds no text"):
        explain(Trace({}, []), cost)
    for policy, price in (("exact", 5.0), ("priced", float("nan")), ("priced", 1e300)):
        with pytest.raises(ExplainError, match="above 0 for the policy priced"):
            explain(trace, cost, policy, price=price)
    largest = explain(trace, cost, "fixed:99999", max_nodes=2)
    assert all("at most (--max-nodes" in str(node.why) for node in largest.left_out)


def test_where_trace_profile_and_plan_differ_is_said():
    trace = replace(markov_trace(num_texts=2, length=12), identity={"target": "toy", "prompts_sha256": "abc"})
    cost = CostModel(replace(cost_model().profile, identity=Identity(device="gpu", target="other"), provenance="composed"))
    plan = Plan("exact", identity={"device": "cpu", "prompts_sha256": "abc"})
    account = explain(trace, cost, "exact", plan=plan)
    lines = headline(replace(account, key="a\x1b[31m"), TokenNames())
    assert lines[0].startswith("a\\x1b[31m, ") and lines[1].endswith("; composed profile")
    assert lines[2] == "A what-if: trace and profile differ (target 'toy' in the trace, 'other' in the profile)."
    assert "tuned on these very texts" in lines[3] and "device 'cpu' in the plan, 'gpu' in the profile" in lines[4]


def test_wrong_places_are_refused():
    trace, cost = markov_trace(num_texts=2, length=5), cost_model()
    for arguments, message in (
        ({"text": "text-7"}, "no text 'text-7'"),
        ({"text": 2}, "texts 0 to 1"),
        ({"anchor": 4}, "expected 0 to 3"),
        ({"anchor": 1, "round_number": 1}, "not both"),
    ):
        with pytest.raises(ExplainError, match=message):
            explain(trace, cost, "exact", **arguments)  # type: ignore[arg-type]
    assert explain(trace, cost, "exact", text="1").key == "text-1"


def spelled(token_ids: list[int]) -> str:
    return "".join({10: " the", 20: " [cat]", 21: "\n", 30: "$5$", 31: "\ufffd"}.get(token, "x") for token in token_ids)


def test_the_terminal_shows_tokens_and_reasons():
    account, names = explain(worked_trace(), cost_model(), "priced", price=20.0), TokenNames(spelled)
    out = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_explanation(account, names, out)
    text = out.export_text()
    assert "␣the  root" in text and "␣[cat]" in text and "⏎" in text and "#31" in text
    assert "✓ accepted" in text and "a second costs 20.00 tokens (as asked)" in text
    assert "it would bring 0.150 tokens and take time worth 0.200" in text
    assert "It left the tree at depth 2 with $5$, number 5 in the order" in text


def test_names():
    names = TokenNames(spelled)
    assert (names(10), names(31), names(5, 3)) == ("␣the", "#31", "x")
    assert TokenNames()(12) == "#12"
    assert TokenNames(lambda ids: "abcdefgh")(1, 4) == "abc…"
    assert names.text([10, 20], spaces=True) == " the [cat]"
    assert TokenNames(lambda ids: "a\x07")(1) == "a\\x07"


def test_a_tokenizer_file_is_read_and_a_missing_one_refused(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path))
    folder = tmp_path / "targets" / "toy"
    folder.mkdir(parents=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"cat": 0, "dog": 1}, unk_token="cat"))
    tokenizer.save(str(folder / "tokenizer.json"))
    for where in ("toy", str(folder), str(folder / "tokenizer.json")):
        assert tokenizer_file(where) == folder / "tokenizer.json"
        assert load_names(where, None)(1) == "dog"
    assert load_names(None, "toy")(0) == "cat"
    assert load_names(None, "another")(0) == "#0"  # nothing was asked for: ids will do
    with pytest.raises(ExplainError, match="no tokenizer at"):
        load_names("another", None)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ExplainError, match="is no tokenizer"):
        load_names("toy", None)


def test_the_picture_holds_every_node_and_no_two_in_one_place(tmp_path):
    trace, cost = markov_trace(num_texts=2, length=12), cost_model(0.001)
    account = explain(trace, cost, "exact", anchor=3)
    nodes = drawn_nodes(account)
    at = layout(nodes)
    assert set(at) == {(), *nodes} and len(set(at.values())) == len(at)
    assert all(key[:-1] in at and at[key][0] == len(key) for key in nodes)
    path = draw_explanation(account, TokenNames(), tmp_path / "tree.svg")
    text = " ".join(ElementTree.fromstring(path.read_text()).itertext())
    for node in nodes.values():
        assert f"#{node.token_id}" in text
    assert draw_explanation(account, TokenNames(spelled), tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    assert path.read_bytes() == draw_explanation(account, TokenNames(), tmp_path / "again.svg").read_bytes()
    with pytest.raises(FigureError, match="png, svg, pdf"):
        draw_explanation(account, TokenNames(), tmp_path / "tree.gif")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_drawn_and_written_as_json(tmp_path, name):
    account = explain(markov_trace(num_texts=1, length=6), cost_model(), name, anchor=4)
    assert draw_explanation(account, TokenNames(), tmp_path / "tree.png").exists()
    document = json.loads(json.dumps(to_jsonable(account.to_dict()), allow_nan=False))
    assert (document["schema"], document["num_nodes"]) == ("treebudget.explain", len(account.nodes))


def test_scored_edges_are_explained_by_their_parent(tmp_path):
    class Flipped:
        """Believes that after its first candidate comes the second, and the other way round."""

        top_k = 2
        identity: dict = {}

        def check(self, identity):
            """Fits everything."""

        def edges(self, token_ids, log_probs, root_token_ids):
            edges = np.full((len(token_ids), token_ids.shape[1], 2, 2), np.log(0.1))
            edges[:, :, 0, 1] = edges[:, :, 1, 0] = np.log(0.8)
            edges[:, 0, 1] = -np.inf
            return edges

    account = explain(worked_trace(), cost_model(), "fixed:2", plan=Plan("fixed:2", attached=Flipped()))
    assert account.edges == "scored"
    assert [node.path for node in account.nodes] == [(21,), (21, 31)]
    assert account.nodes[1].edge_probability == pytest.approx(0.8)
    assert account.divergence.token_id == 20
