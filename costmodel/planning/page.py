"""One self-contained HTML page of a what-if: curves, throughput, a map of budgets, cost; readable without a network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from costmodel.clitools import to_jsonable
from costmodel.planning.errors import PageUnavailable
from costmodel.planning.pricing import Pricer
from costmodel.planning.render import Lines, inverse_tables, lines_of
from costmodel.planning.whatif import CASES, Settings, choose

CURVE_POINTS = 48
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1180px;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}.plot{width:100%;height:420px}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}
td,th{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
#answer{font-size:1.1rem;font-weight:600;margin:.6rem 0}small{color:#555}
"""
SCRIPT = """
const doc = JSON.parse(document.getElementById('data').textContent);
const layout = (x, y, more) => Object.assign({xaxis:{title:{text:x}}, yaxis:{title:{text:y}}, margin:{t:20,r:20},
  legend:{orientation:'h',y:-0.25}}, more);
const options = {responsive:true, displaylogo:false};
const pick = id => document.getElementById(id);
const find = () => doc.rows.find(r => r.profile === pick('profile').value && r.context_tokens === +pick('context').value
  && r.batch === +pick('batch').value);
const ends = (r, key, digits) => r[key] === null ? 'no price' : r[key].toFixed(digits) + ' ['
  + r.interval[key][0].toFixed(digits) + ', ' + r.interval[key][1].toFixed(digits) + ']';
function fill(id, values) { for (const v of values) { const o = document.createElement('option'); o.value = o.textContent = v;
  pick(id).appendChild(o); } pick(id).onchange = draw; }
function series(list, make) { return list.filter(c => c.profile === pick('profile').value).map(make); }
function draw() {
  const row = find(), profile = pick('profile').value, rows = doc.rows.filter(r => r.profile === profile);
  pick('answer').textContent = 'chosen budget: ' + row.budget + ' nodes per request (' + row.provenance + ')'
    + (row.interval.budget[0] === row.interval.budget[1] ? '' : ', between ' + row.interval.budget.join(' and '));
  pick('details').textContent = ends(row, 'tokens_per_round', 2) + ' tokens per round, ' + ends(row, 'ms_per_token', 2)
    + ' ms per token, ' + ends(row, 'tokens_per_second_per_gpu', 0) + ' tokens/s per GPU, '
    + ends(row, 'speedup_over_plain', 2) + ' times plain decoding, ' + (100 * row.gain_over_fixed).toFixed(1) + ' % ['
    + row.interval.gain_over_fixed.map(g => (100 * g).toFixed(1)).join(', ') + '] over fixed ' + row.fixed_budget
    + '; cost per million tokens '
    + ends(row, 'cost_per_million_tokens', 3) + '; ' + row.verdict;
  Plotly.react('curves', series(doc.curves, c => ({x:c.verify_tokens, y:c.ms,
    name:'context ' + c.context_tokens + ' (' + c.provenance + ')',
    error_y:{type:'data', symmetric:false, array:c.above, arrayminus:c.below, thickness:.6, width:0}, mode:'lines+markers',
    marker:{size:4}})), layout('', '', {xaxis:{type:'log', title:{text:'verify tokens, one request'}},
    yaxis:{type:'log', title:{text:'ms per forward'}}}), options);
  Plotly.react('throughput', series(doc.throughput.filter(t => t.batch === +pick('batch').value), t => ({x:t.budget, y:t.per_gpu,
    name:'context ' + t.context_tokens + ' (' + t.provenance + ')', mode:'lines+markers',
    error_y:{type:'data', symmetric:false, array:t.above, arrayminus:t.below, thickness:.6, width:0}})),
    layout('budget: nodes per request (0 = plain)', 'tokens/s per GPU', {}), options);
  const xs = doc.batches.map(String), ys = doc.contexts.map(String);
  const cell = (c, b) => rows.find(r => r.context_tokens === c && r.batch === b);
  const z = doc.contexts.map(c => doc.batches.map(b => cell(c, b).budget));
  const label = doc.contexts.map(c => doc.batches.map(b => cell(c, b).budget
    + (cell(c, b).fits === false ? ' (does not fit)' : '') + '<br>' + cell(c, b).provenance));
  Plotly.react('map', [{type:'heatmap', x:xs, y:ys, z:z, text:label, texttemplate:'%{text}', colorscale:'YlGnBu', zmin:0,
    zmax:Math.max(1, ...z.flat()),
    colorbar:{title:{text:'budget'}}}], layout('batch', 'context tokens', {xaxis:{type:'category', title:{text:'batch'}},
    yaxis:{type:'category', title:{text:'context tokens'}}}), options);
  const priced = doc.rows.some(r => r.cost_per_million_tokens !== null);
  const key = priced ? 'cost_per_million_tokens' : 'tokens_per_second_per_gpu';
  const names = [...new Set(doc.rows.map(r => r.profile))];
  Plotly.react('cost', names.map(n => { const own = doc.rows.filter(r => r.profile === n
    && r.context_tokens === +pick('context').value && r[key] !== null);
    return {type:'bar', name:n, x:own.map(r => 'batch ' + r.batch), y:own.map(r => r[key]),
    text:own.map(r => r.provenance), error_y:{type:'data', symmetric:false, array:own.map(r => r.interval[key][1] - r[key]),
    arrayminus:own.map(r => r[key] - r.interval[key][0])}}; }),
    layout('', priced ? 'cost per million tokens' : 'no price given: tokens/s per GPU', {barmode:'group'}), options);
}
fill('profile', [...new Set(doc.rows.map(r => r.profile))]); fill('context', doc.contexts); fill('batch', doc.batches);
draw();
"""


def page(
    document: Mapping[str, Any], pricers: Sequence[Pricer], tokens: Any, errors: Sequence[float], settings: Settings,
    title: str = "treebudget what-if",
) -> str:  # fmt: skip
    """The page for a what-if document (see commands). Raises PageUnavailable where plotly is not installed."""
    data = {
        "rows": document["rows"], "contexts": list(settings.contexts), "batches": list(settings.batches),
        "curves": [_curve(pricer, context) for pricer in pricers for context in settings.contexts],
        "throughput": [
            _throughput(pricer, tokens, errors, context, batch)
            for pricer in pricers for context in settings.contexts for batch in settings.batches
        ],
    }  # fmt: skip
    embedded = json.dumps(to_jsonable(data), ensure_ascii=False).replace("<", "\\u003c")
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in document["assumptions"])
    sources = "".join(
        f"<li><b>{html.escape(item['name'])}</b>: {html.escape(item['provenance'])}; {html.escape(item['source'])}</li>"
        for item in document["profiles"]
    )
    backwards = "".join(
        f"<h2>{html.escape(heading)}</h2>{_table(lines, f'backwards-{number}')}"
        for number, (heading, lines) in enumerate(inverse_tables(document))
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>
<script>{plotly_js()}</script></head><body>
<h1>{html.escape(title)}</h1>
<p>Acceptance: {html.escape(document["acceptance"]["source"])}. Brackets and bars are 90 % intervals.</p>
<p>Profile <select id="profile"></select> context <select id="context"></select> batch <select id="batch"></select></p>
<p id="answer"></p><p id="details"></p>
<h2>Cost of a forward</h2><div id="curves" class="plot"></div>
<h2>Throughput against budget</h2><div id="throughput" class="plot"></div>
<h2>Chosen budget</h2><div id="map" class="plot"></div>
<h2>Cost per million tokens</h2><div id="cost" class="plot"></div>
<h2>All answers</h2>{_table(lines_of(document["rows"]), "answers")}
{backwards}
<h2>Where the numbers come from</h2><ul>{sources}</ul><h2>What is assumed</h2><ul>{notes}</ul>
<script type="application/json" id="data">{embedded}</script><script>{SCRIPT}</script></body></html>
"""


def plotly_js() -> str:
    """plotly.js as text, from the plotly package. Raises PageUnavailable where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PageUnavailable("the page needs plotly, which is not installed", hint="pip install 'treebudget[plan]'") from error
    return get_plotlyjs()


def _curve(pricer: Pricer, context: int) -> dict[str, Any]:
    base = pricer.measured_requests[0]
    sizes = np.array(sorted({cell.verify_tokens for cell in pricer.cost.profile.verify if cell.num_requests == base}), float)
    if sizes.size > CURVE_POINTS:
        sizes = sizes[np.unique(np.geomspace(1, sizes.size, CURVE_POINTS).astype(int) - 1)]
    seconds = pricer.cost.verify_seconds(sizes, context, base)
    low, high = pricer.cost.verify_interval(sizes, context, base)
    return {
        "profile": pricer.name, "context_tokens": context, "provenance": pricer.cost.provenance, "verify_tokens": sizes,
        "ms": 1e3 * seconds, "below": 1e3 * (seconds - low), "above": 1e3 * (high - seconds),
    }  # fmt: skip


def _throughput(pricer: Pricer, tokens: Any, errors: Sequence[float], context: int, batch: int) -> dict[str, Any]:
    expected, cheap, dear = (choose(pricer, tokens, context, batch, case, errors).rates for case in CASES)
    scale = batch / pricer.tensor_parallel
    return {
        "profile": pricer.name, "context_tokens": context, "batch": batch, "provenance": pricer.provenance(batch),
        "budget": list(range(tokens.size)), "per_gpu": scale * expected, "below": scale * (expected - dear),
        "above": scale * (cheap - expected),
    }  # fmt: skip


def _table(lines: Lines, name: str) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in lines[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines[1:])
    return f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
