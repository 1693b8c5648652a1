from __future__ import annotations

import numpy as np
import pytest

from costmodel.statistics import drifts, summarize, two_modes


def test_an_ordinary_sample():
    summary = summarize([2.2, 1.8, 2.0])
    assert (summary.seconds, summary.num_samples, summary.flags) == (2.0, 3, ())
    assert summary.low_seconds == pytest.approx(1.84) and summary.high_seconds == pytest.approx(2.16)


def test_false_alarms_are_rare():
    # 2,000 samples of 12 at 5 % normal noise; about 1 % of them are flagged for either reason. The seed is fixed, so the
    # test cannot fail by chance.
    random = np.random.default_rng(0)
    samples = 0.01 * (1 + 0.05 * random.standard_normal((2000, 12)))
    assert sum(two_modes(sample) is not None for sample in samples) <= 40
    assert sum(drifts(sample) for sample in samples) <= 40


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_two_modes_are_found(share):
    # The seed is fixed; the number of slow calls is exact and only their order and the 2 % noise are random.
    random = np.random.default_rng(1)
    for _ in range(50):
        slow = random.permutation(20) < share * 20
        sample = np.where(slow, 0.014, 0.010) * (1 + 0.02 * random.standard_normal(20))
        summary = summarize(sample)
        assert "bimodal" in summary.flags
        typical = 0.014 if share > 0.5 else 0.010
        assert summary.seconds == pytest.approx(typical, rel=0.04)


def test_one_outlier_is_neither_mode_nor_drift():
    assert summarize([0.01] * 5 + [0.05] + [0.01] * 6).flags == ()


def test_a_wide_scatter_is_flagged_unless_it_is_too_small_to_matter():
    values = np.array([0.10, 0.30, 0.12, 0.25])
    assert summarize(values).flags == ("noisy",) and summarize(values / 1000).flags == ()


def test_drift_is_found():
    values = np.linspace(0.010, 0.013, 12)
    assert "drift" in summarize(values).flags
    assert not drifts(np.array([0.01, 0.02]))
