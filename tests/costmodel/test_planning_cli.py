from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from costmodel import Identity, Profile, cli
from costmodel.planning import page as pages
from costmodel.planning.errors import PageUnavailable

BASE = ("whatif", "--profile", "a800-qwen3-8b")


def invoke(*arguments: str):
    return CliRunner().invoke(cli.main, list(arguments))


def test_json_rows_carry_provenance_and_intervals():
    result = invoke(*BASE, "--survival", "0.85", "--context", "1024,4096", "--batch", "1,8", "--price", "2", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["schema"] == "treebudget.whatif" and len(document["rows"]) == 4
    for row in document["rows"]:
        assert row["provenance"] == ("published" if row["batch"] == 1 else "estimated")
        assert set(row["interval"]) >= {"ms_per_token", "speedup_over_plain", "cost_per_million_tokens"}
        for key, (low, high) in row["interval"].items():
            if key == "stops_paying_at_batch":  # None is "nowhere up to searched_to_batch", later than any batch
                low, value, high = (math.inf if item is None else item for item in (low, row[key], high))
                assert low <= value <= high
            else:
                assert low <= row[key] + 1e-9 * abs(row[key]) and row[key] <= high + 1e-9 * abs(high), key
        assert set(row["interval"]) >= {"budget", "gain_over_fixed", "stops_paying_at_batch", "tokens_per_round"}
        assert row["weights_bytes"] and row["largest_batch"]


def test_csv_has_the_same_rows():
    arguments = (*BASE, "--survival", "0.9,0.7,0.5", "--batch", "1,4")
    rows = list(csv.DictReader(io.StringIO(invoke(*arguments, "--csv", "--quiet").stdout)))
    document = json.loads(invoke(*arguments, "--json").stdout)
    assert [int(row["budget"]) for row in rows] == [row["budget"] for row in document["rows"]]
    assert float(rows[0]["ms_per_token_low"]) == document["rows"][0]["interval"]["ms_per_token"][0]
    assert {row["answer"] for row in rows} == {"what-if"} and all(row["provenance"] for row in rows)


BACKWARDS = ("--slo-ms-per-token", "25", "--break-even", "--requests-per-second", "5", "--output-tokens", "200")


def test_csv_answers_the_inverse_questions_too():
    arguments = (*BASE, "--survival", "0.9,0.7,0.5", "--batch", "1,4", *BACKWARDS)
    rows = list(csv.DictReader(io.StringIO(invoke(*arguments, "--csv", "--quiet").stdout)))
    document = json.loads(invoke(*arguments, "--json").stdout)
    for name, key in (("what-if", "rows"), ("slo", "slo"), ("break-even", "break_even"), ("fleet", "fleet")):
        own = [row for row in rows if row["answer"] == name]
        assert len(own) == len(document[key]) > 0
        for line, row in zip(own, document[key], strict=True):
            assert line["provenance"] == row["provenance"] and line["profile"] == row["profile"]
            for figure, ends in row["interval"].items():
                for suffix, end in zip(("low", "high"), ends or (None, None), strict=True):
                    assert line[f"{figure}_{suffix}"] == ("" if end is None else str(end))
    assert rows[-1]["gpus"] and not rows[0]["gpus"]  # a column that an answer does not have is empty


def test_every_figure_of_an_inverse_answer_lies_within_its_ends():
    document = json.loads(invoke(*BASE, "--survival", "0.85", "--context", "1024,8192", *BACKWARDS, "--json").stdout)
    figures = {"slo": {"largest_batch", "budget", "ms_per_token"}, "fleet": {"gpus", "requests_in_flight"}}
    figures["break_even"] = {"acceptance_length", "acceptance_rate", "conditional_acceptance"}
    for key, expected in figures.items():
        for row in document[key]:
            assert set(row["interval"]) == expected
            for figure in expected:
                low, value, high = (math.inf if item is None else item for item in (row["interval"][figure][0], row[figure],
                                                                                    row["interval"][figure][1]))  # fmt: skip
                assert low <= value * (1 + 1e-9) and value <= high * (1 + 1e-9), (key, figure)


def test_table_and_inverse_questions():
    result = invoke(
        *BASE, "--acceptance-length", "3.2", "--drafted", "7", "--slo-ms-per-token", "25", "--break-even",
        "--requests-per-second", "5", "--output-tokens", "200",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in ("published", "no price", "largest batch", "each position", "requests in flight", "not worth it", "vs fixed"):
        assert words in result.stdout
    assert "Poisson" in result.stderr and "not in the profile, charged 0" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "never assumed"),
        (("--survival", "0.5,0.7"), 2, "rises"),
        (("--survival", "0.5", "--acceptance-rate", "0.5"), 2, "given twice"),
        (("--acceptance-rate", "0.5"), 2, "--drafted"),
        (("--acceptance-length", "9", "--drafted", "4"), 2, "between 1 and 5"),
        (("--survival", "high"), 2, "not a list"),
        (("--survival", "0.5", "--batch", "0"), 2, "below 1"),
        (("--survival", "0.5", "--json", "--csv"), 2, "both want stdout"),
        (("--survival", "0.5", "--requests-per-second", "3"), 2, "--output-tokens"),
        (("--survival", "0.5", "--price", "cheap"), 2, "is no price"),
        (("--survival", "0.5", "--price", "h100=2"), 2, "no --profile"),
        (("--survival", "0.5", "--tree"), 2, "--siblings"),
        (("--survival", "0.5", "--profile", "no-such"), 1, "no-such"),
    ],
)
def test_mistakes_are_named(arguments, code, words):
    result = invoke(*BASE, *arguments)
    assert result.exit_code == code and words in result.stderr and "Traceback" not in result.output


def test_help_has_examples():
    result = invoke("whatif", "-h")
    assert result.exit_code == 0 and "Examples:" in result.output and "--slo-ms-per-token 25" in result.output


def test_trees_take_more_nodes_than_chains():
    document = json.loads(invoke(*BASE, "--survival", "0.7", "--siblings", "0.4,0.15", "--json").stdout)
    chain = json.loads(invoke(*BASE, "--survival", "0.7", "--json").stdout)
    assert document["rows"][0]["tokens_per_round"] > chain["rows"][0]["tokens_per_round"]
    assert "tree" in " ".join(document["assumptions"])


def test_asking_loads_neither_plots_nor_models():
    code = (
        "import sys; from costmodel.cli import main\n"
        "try: main(['whatif', '--profile', 'a800-qwen3-8b', '--survival', '0.8', '--quiet'])\n"
        "except SystemExit: pass\n"
        "heavy = {'matplotlib.pyplot', 'plotly', 'torch', 'transformers', 'pandas', 'pyarrow', 'numba', 'scipy.stats'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip().endswith("[]")


def test_without_plotly_the_page_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(PageUnavailable) as caught:
        pages.plotly_js()
    assert "treebudget[plan]" in str(caught.value.hint)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


def test_the_page_opens_in_a_browser_and_shows_the_chosen_budget(tmp_path):
    pytest.importorskip("plotly", reason="the page needs the extra `plan` (plotly)")
    page = tmp_path / "plan.html"
    arguments = (*BASE, "--survival", "0.85", "--context", "1024,4096", "--batch", "1,8", "--price", "2", *BACKWARDS)
    result = invoke(*arguments, "--html", str(page), "--json")
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", text)  # nothing is fetched
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    command = [
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'user'}",
        "--virtual-time-budget=20000",
        "--dump-dom",
        page.as_uri(),
    ]
    environment = {**os.environ, "HOME": str(tmp_path)}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment).stdout
    rows = json.loads(result.stdout)["rows"]
    answer = re.search(r'<p id="answer">([^<]*)</p>', shown)
    assert answer is not None
    assert answer[1].startswith(f"chosen budget: {rows[0]['budget']} nodes per request (published)")
    assert "not worth it" in shown[shown.index('id="details"') : shown.index('id="curves"')]
    for heading in ("Largest batch within a latency", "Acceptance at which speculation pays", "GPUs that carry the load"):
        assert f"<h2>{heading}</h2><table" in shown
    assert len(re.findall(r'class="[^"]*js-plotly-plot', shown)) == 4  # curves, throughput, map, cost
    map_text = shown[shown.index('id="map"') : shown.index('id="cost"')]
    assert f">{rows[0]['budget']}<" in map_text or f"{rows[0]['budget']}&lt;br&gt;" in map_text


def test_a_profile_of_a_machine_without_memory_facts_says_why_nothing_is_said_of_fitting(tmp_path):
    shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocab": 1000}
    identity = Identity(device="some CPU", target="toy", model_shape=shape, dtype="bfloat16", block_size=8)
    Profile.from_points([1, 4, 8], [0.02, 0.021, 0.024], draft_seconds=0.002, identity=identity).save(tmp_path / "cpu.json")
    arguments = ("whatif", "--profile", str(tmp_path / "cpu.json"), "--survival", "0.8")
    silent = invoke(*arguments)
    assert "what fits is not known: no memory size known for some CPU; --memory-gb gives it" in silent.stderr
    assert " ? " in silent.stdout
    told = invoke(*arguments, "--memory-gb", "4")
    assert told.exit_code == 0 and "what fits is not known" not in told.stderr and " ? " not in told.stdout
