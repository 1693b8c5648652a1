"""Composition from operator tables (skipped without the extra `ops`), the roofline, GPU facts and model shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from costmodel import CostModel, cli, load_profile, shapes
from costmodel.compose import attention_bounds, compose_profile, elementwise_seconds, forward_without_attention, operators_of
from costmodel.errors import OpsNotInstalled, UsageError
from costmodel.gpus import find_gpu, known_gpus
from costmodel.operators import OperatorTables
from costmodel.roofline import Roofline, calibrate, estimate_profile
from costmodel.shapes import ModelShape, find_shape, model_sources, shipped_models

NEEDS = "needs the operator tables: pip install treebudget[ops]"
ops = pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason=NEEDS)
QWEN = find_shape("Qwen/Qwen3-8B")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path / "cache"))


# Milliseconds of Qwen3-8B at context 1024, attention reading the cache once and once per token: an independent composition
# from the same tables (aiconfigurator, Apache-2.0).
@ops
@pytest.mark.parametrize(
    ("system", "engine", "version", "rows"),
    [
        ("a100_sxm", "vllm", "0.14.0", {1: (11.61, 11.61), 8: (11.46, 12.3), 64: (12.08, 18.7), 512: (35.12, 115)}),
        ("h100_sxm", "vllm", "0.24.0", {1: (6.37, 6.37), 16: (7.18, 8.0), 64: (7.33, 11.3), 512: (11.84, 54.8)}),
        ("h200_sxm", "vllm", "0.24.0", {1: (5.07, 5.07), 16: (5.33, 6.0), 64: (5.67, 8.2), 512: (11.43, 45.3)}),
        ("l40s", "vllm", "0.24.0", {1: (22.30, 22.30), 64: (25.56, 41.4), 512: (39.15, 224)}),
        ("b200_sxm", "vllm", "0.24.0", {1: (3.64, 3.64), 64: (3.79, 5.2), 512: (6.47, 23.4)}),
    ],
)
def test_composition_agrees_with_an_independent_one(system, engine, version, rows):
    operators = replace(operators_of(OperatorTables.find(system, engine, version), QWEN), flops_per_second=None)
    tokens = np.array(sorted(rows), float)
    base = forward_without_attention(QWEN, operators, tokens)
    once, each = attention_bounds(QWEN, operators, tokens, 1024, 1)
    np.testing.assert_allclose(1e3 * (base + once), [rows[int(t)][0] for t in tokens], rtol=2e-3)
    exact = tokens < 512  # beyond, each side extrapolates the attention table in its own way
    np.testing.assert_allclose(1e3 * (base + each)[exact], [rows[int(t)][1] for t in tokens[exact]], rtol=0.01)
    np.testing.assert_allclose(1e3 * (base + each)[~exact], [rows[int(t)][1] for t in tokens[~exact]], rtol=0.25)


@ops
def test_a_composed_profile_says_what_it_is_and_bounds_attention_from_both_sides():
    profile = compose_profile(QWEN, OperatorTables.find("h100_sxm"), contexts=(0, 1024, 16384), requests=(1, 16))
    assert profile.provenance == "composed" and "aiconfigurator-core" in profile.source and "Apache-2.0" in profile.source
    cost = CostModel(profile)
    low, high = cost.verify_interval(64, 16384)
    assert low < cost.verify_seconds(64, 16384) < high and high > 3 * low
    assert cost.draft_seconds(1024) == pytest.approx(1.0e-3, rel=0.5)
    assert np.all(np.diff(cost.verify_seconds(64, [0, 1024, 16384], 16)) > 0)


@ops
def test_a_mixture_of_experts_is_composed_and_concave():
    tables = OperatorTables.find("h100_sxm")
    cost = CostModel(compose_profile(find_shape("qwen3-30b-a3b"), tables, contexts=(1024,), requests=(1,)))
    steps = cost.verify_seconds([1, 32, 512], 1024)
    assert steps[1] > 3 * steps[0] and steps[2] < 2 * steps[1]
    assert cost.diagnostics.concave_stretches and cost.experts is not None


@ops
def test_any_configuration_is_composed_from_the_command_line(tmp_path):
    config = {**shipped_models()["Qwen/Qwen3-8B"], "num_hidden_layers": 3, "hidden_size": 3000, "intermediate_size": 9000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), str(tmp_path / "config.json"), "Qwen/Qwen3-8B"):
        out = tmp_path / "h100.json"
        result = CliRunner().invoke(cli.main, ["compose", "--gpu", "h100", "--model", model, "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert result.stdout.strip() == f"composed: {out}"
        assert all(line.startswith("composed: ") for line in result.stderr.splitlines())
        assert load_profile(out).provenance == "composed"


@ops
def test_tables_that_are_missing_or_known_to_be_wrong_are_refused():
    with pytest.raises(UsageError, match="known to be wrong"):
        OperatorTables.find("l40s", "trtllm")
    with pytest.raises(UsageError, match="no vllm 9.9 tables"):
        OperatorTables.find("h100_sxm", "vllm", "9.9")
    with pytest.raises(UsageError, match="no operator tables for 'a40'"):
        OperatorTables.find("a40")
    with pytest.raises(UsageError, match="not measured"):
        operators_of(OperatorTables.find("h100_sxm"), replace(QWEN, heads=7, kv_heads=7)).attention(np.ones(1), np.ones(1))


def test_without_the_tables_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("costmodel.operators.find_spec", lambda name: None)
    with pytest.raises(OpsNotInstalled) as caught:
        OperatorTables.find("h100_sxm")
    assert "treebudget[ops]" in str(caught.value.hint)
    result = CliRunner().invoke(cli.main, ["compose", "--gpu", "h100", "--model", "Qwen/Qwen3-8B"])
    assert result.exit_code == 1 and "treebudget[ops]" in result.stderr
    offered = CliRunner().invoke(cli.main, ["profile", "--gpu", "h100", "--target", "Qwen/Qwen3-14B"])
    assert offered.exit_code == 0 and offered.stdout.startswith("estimated: ")


def test_a_gpu_without_tables_points_to_the_estimate():
    result = CliRunner().invoke(cli.main, ["compose", "--gpu", "a40", "--model", "Qwen/Qwen3-8B"])
    assert result.exit_code == 2 and "costmodel estimate" in result.stderr


def test_elementwise_operations_by_hand():
    # 2 x (read and write 2 x 4096) + (read 2, write 1 x 12288), 2 bytes each, at 80 % of 2,039 GB/s, and 3 starts of 3 us
    by_hand = (2 * 4 * 4096 + 3 * 12288) * 2 / (0.8 * 2039e9) + 9e-6
    assert elementwise_seconds(QWEN, np.array([1.0]), (2039e9, 0.8, 3e-6))[0] == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx(9.09e-6, rel=1e-3)


def test_shapes_count_weights_and_read_every_kind_of_configuration():
    # Published sizes less the embedding, which is only looked up.
    assert QWEN.weight_bytes() / 2 == pytest.approx(8.19e9 - 151936 * 4096, rel=0.01)
    moe = find_shape("qwen3-30b-a3b")
    assert moe.weight_bytes() / 2 == pytest.approx(30.5e9 - 151936 * 2048, rel=0.01)
    assert moe.flops_per_token() / 2 == pytest.approx(3.35e9 - 151936 * 2048, rel=0.03)
    nested = ModelShape.from_config({"text_config": shipped_models()["Qwen/Qwen3-8B"], "model_type": "multi"}, "x")
    assert replace(nested, name=QWEN.name) == QWEN
    sparse = {**shipped_models()["Qwen/Qwen3-30B-A3B"], "first_k_dense_replace": 1, "n_shared_experts": 2}
    found = ModelShape.from_config(sparse)
    assert (found.dense_layers, found.expert_layers, found.shared_intermediate) == (1, 47, 1536)
    for bad in ({"hidden_size": 5}, {**sparse, "kv_lora_rank": 512}):
        with pytest.raises(UsageError):
            ModelShape.from_config(bad)
    with pytest.raises(UsageError, match="no shipped shape"):
        find_shape("nobody/nothing")


def test_gpu_facts_are_dense_rates_with_sources():
    for gpu in known_gpus():
        assert gpu.sources and gpu.bytes_per_second > 5e11 and 1e14 < gpu.flops_per_second < 2.6e15
    assert find_gpu("NVIDIA H200") == find_gpu("h200") and find_gpu("NVIDIA A100-SXM4-80GB") == find_gpu("a100")
    assert find_gpu("l40s").flops_per_second == pytest.approx(362.05e12)  # 733 is the sparsity-doubled figure


DEVICES = {
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB", "NVIDIA H100 PCIe": "H100-PCIe-80GB", "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB", "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA A100-PCIE-40GB": "A100-PCIe-40GB", "NVIDIA L40S": "L40S-48GB", "NVIDIA H200": "H200-SXM-141GB",
    "NVIDIA B200": "B200-SXM", "NVIDIA A40": "A40", "NVIDIA A800-SXM4-80GB": "A800-SXM4-80GB",
    "NVIDIA GeForce RTX 4090": "RTX-4090-24GB", "NVIDIA GeForce RTX 5090": "RTX-5090-32GB",
    "NVIDIA RTX A6000": "RTX-A6000-48GB",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000-Blackwell-Server",
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_device_names_of_drivers_are_found(device):
    """As `torch.cuda.get_device_name` and nvidia-smi give them."""
    assert find_gpu(device).name == DEVICES[device]
    assert find_gpu(device.lower().replace(" ", "-")) == find_gpu(device)


@pytest.mark.parametrize(
    "device",
    ["NVIDIA A10", "NVIDIA L40", "NVIDIA H100 NVL", "NVIDIA H20", "NVIDIA GH200 480GB", "Tesla T4", "NVIDIA A4000", "abacus", ""],
)
def test_a_relative_of_a_known_gpu_is_not_taken_for_it(device):
    with pytest.raises(UsageError, match="no facts"):
        find_gpu(device)


def test_no_name_means_two_gpus():
    for gpu in known_gpus():
        assert all(find_gpu(name) == gpu for name in (gpu.name, *gpu.aliases))


def test_every_number_of_a_shipped_shape_has_a_source():
    for name, source in model_sources().items():
        assert source.sources and not source.unverified, name
    assert set(model_sources()) == set(shipped_models())


def test_an_entry_nobody_checked_is_unverified_in_every_field(monkeypatch):
    monkeypatch.setattr(shapes, "_models_file", lambda: {"models": {"a/b": {"hidden_size": 8, "vocab_size": 9}}})
    assert model_sources()["a/b"].unverified == ("hidden_size", "vocab_size")
    listed = CliRunner().invoke(cli.main, ["list"]).stdout
    assert "a/b  (UNVERIFIED: hidden_size, vocab_size; no source)" in listed


def test_shapes_agree_with_the_configurations_in_the_operator_tables_package():
    """Independent copies of the hub's config.json; where the extra is not installed there is nothing to compare with."""
    package = pytest.importorskip("aiconfigurator_core", reason="the extra `ops` is not installed")
    compared = 0
    for name, config in shipped_models().items():
        file = name.replace("/", "--").replace("Llama-3.1", "Meta-Llama-3.1") + "_config.json"
        path = Path(package.__file__).parent / "model_configs" / file
        if path.is_file():
            theirs = {"head_dim": config["hidden_size"] // config["num_attention_heads"], **json.loads(path.read_text())}
            assert {key: theirs[key] for key in config} == config
            compared += 1
    assert compared >= 8


def test_an_estimate_never_passes_as_a_measurement_and_spans_a_range():
    cost = CostModel(estimate_profile(find_gpu("a100"), QWEN))
    assert cost.provenance == "estimated" and any("not a measurement" in note for note in cost.profile.notes)
    for tokens, known in ((1, 11.61e-3), (64, 12.08e-3), (512, 35.12e-3)):  # composed, as above
        low, high = cost.verify_interval(tokens, 1024)
        assert low < known < high


def test_calibration_recovers_the_roofline_that_made_the_points():
    gpu, truth = find_gpu("h100"), Roofline(0.6, 0.5, 0.02, 3.0)
    places = [(t, c) for t in (1, 16, 64, 256, 512) for c in (1, 4000, 32000)]
    tokens, contexts = (np.array(item, float) for item in zip(*places, strict=True))
    seconds = truth.verify_seconds(gpu, QWEN, tokens, contexts, np.ones(tokens.size))
    profile = CostModel.from_points(tokens, seconds, contexts).profile
    _, error = calibrate(gpu, QWEN, profile.verify)
    assert error < 0.02
    estimated = CostModel(estimate_profile(gpu, QWEN, profile, contexts=(1, 4000, 32000), requests=(1,)))
    np.testing.assert_allclose(estimated.verify_seconds([1, 64, 512], 4000), seconds[[1, 7, 13]], rtol=0.05)
    assert "calibrated to 15 points" in estimated.profile.source


@pytest.mark.parametrize("name", ["a800-qwen3-8b", "h100-qwen3-8b", "a40-qwen3-8b"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_points_leave_the_interval_wide_enough(name, number):
    """Points of one context are fitted without error by four parameters, and say little of other sizes and contexts."""
    known, gpu = load_profile(name).profile, find_gpu(name.split("-")[0])
    cells = [cell for cell in known.verify if cell.num_requests == 1]
    contexts = sorted({cell.context_tokens for cell in cells})
    row = [cell for cell in cells if cell.context_tokens == contexts[len(contexts) // 2]]
    row.sort(key=lambda cell: cell.verify_tokens)
    points = [row[0], row[-1], row[len(row) // 2]][:number]
    few = replace(known, verify=tuple(replace(cell, low_seconds=None, high_seconds=None) for cell in points), stages=())
    cost = CostModel(estimate_profile(gpu, QWEN, few, requests=(1,)))
    inside = []
    for cell in cells[:: max(1, len(cells) // 150)]:
        low, high = cost.verify_interval(cell.verify_tokens, cell.context_tokens)
        inside.append(low <= cell.seconds <= high)
    assert np.mean(inside) >= 0.88


def test_points_of_another_device_are_refused_or_doubted():
    a100 = load_profile("a100-qwen3-8b").profile
    with pytest.raises(UsageError, match="known points are of .*A100.*, not of"):
        estimate_profile(find_gpu("h100"), QWEN, a100)
    points = CostModel.from_points([1, 8, 64, 256, 512, 1], [0.01] * 6, [0, 0, 0, 0, 0, 4096]).profile
    widths = []
    for device in (None, "a board of ours"):
        known = replace(points, identity=replace(points.identity, device=device))
        cost = CostModel(estimate_profile(find_gpu("h100"), QWEN, known, requests=(1,)))
        low, high = cost.verify_interval(64, 1024)
        widths.append(high / low)
        assert any("another device" in note for note in cost.profile.notes) == (device is not None)
    assert widths[1] > 1.5 * widths[0]


@pytest.mark.parametrize(("change", "said"), [
    ({"num_attention_heads": 0}, "no number"), ({"hidden_size": None}, "no number"), ({"hidden_size": "abc"}, "no number"),
    ({"vocab_size": float("inf")}, "no number"), ({"mlp_only_layers": 5, "num_experts": 8}, "no number"),
    ({"hidden_size": -1024}, "hidden is -1024"), ({"vocab_size": 0}, "vocab is 0"), ({"num_hidden_layers": -3}, "layers is -3"),
    ({"num_experts": 8, "num_experts_per_tok": 9, "moe_intermediate_size": 64}, "9 experts per token of 8"),
])  # fmt: skip
def test_configurations_that_are_no_decoders_are_refused_by_field(change, said):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128}
    assert ModelShape.from_config(config).layers == 2
    with pytest.raises(UsageError, match=said):
        ModelShape.from_config(config | change)


def test_shares_carried_over_from_another_model_widen_the_interval():
    """The A800's own points of Qwen3-4B say how far off an estimate from those of Qwen3-8B is: the interval must hold most."""
    gpu, known = find_gpu("a800"), load_profile("a800-qwen3-8b").profile
    few = replace(known, verify=tuple(cell for cell in known.verify if cell.verify_tokens in (1, 64, 256, 512)))
    truth = load_profile("a800-qwen3-4b").profile.verify
    cost = CostModel(estimate_profile(gpu, find_shape("Qwen/Qwen3-4B"), few, requests=(1,)))
    assert any("of Qwen/Qwen3-8B" in note for note in cost.profile.notes)
    inside = []
    for context in sorted({cell.context_tokens for cell in truth}):
        cells = [cell for cell in truth if cell.context_tokens == context and cell.verify_tokens % 32 == 0]
        low, high = cost.verify_interval([cell.verify_tokens for cell in cells], context)
        inside += [a <= cell.seconds <= b for a, b, cell in zip(low, high, cells, strict=True)]
    assert np.mean(inside) >= 0.9
    own = CostModel(estimate_profile(gpu, find_shape("Qwen/Qwen3-8B"), few, requests=(1,)))
    widths = [np.subtract(*np.log(item.verify_interval(64, 1024))) for item in (cost, own)]
    assert widths[0] < widths[1] < 0  # low less high: the carried-over one is wider
    assert not any("carrying" in note for note in own.profile.notes)


def test_estimate_from_the_command_line(tmp_path):
    out = tmp_path / "e.json"
    arguments = ["estimate", "--gpu", "a800", "--model", "Qwen/Qwen3-4B", "--out", str(out)]
    assert CliRunner().invoke(cli.main, arguments).stdout == f"estimated: {out}\n"
    few = CostModel.from_points([1, 64, 512, 1, 512], [0.034, 0.034, 0.0405, 0.0443, 0.104], [1, 1, 1, 8000, 8000]).profile
    result = CliRunner().invoke(cli.main, [*arguments, "--calibrate", str(few.save(tmp_path / "few.json"))])
    assert result.exit_code == 0, result.output
    assert load_profile(out).verify_seconds(128, 1) == pytest.approx(0.034, rel=0.1)
