from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from costmodel import backend as backends
from costmodel.errors import BackendNotFound
from tests.costmodel.fakes import FakeBackend, VirtualClock


def test_a_fake_engine_is_a_backend():
    assert isinstance(FakeBackend(VirtualClock()), backends.Backend)


def test_backends_come_from_the_entry_point_group(monkeypatch):
    point = EntryPoint("fake", "tests.costmodel.fakes:FakeBackend", backends.GROUP)
    monkeypatch.setattr(backends, "entry_points", lambda group: [point] if group == backends.GROUP else [])
    assert backends.backend_names() == ["fake"]
    made = backends.create_backend("fake", clock=VirtualClock(), block_size=3)
    assert made.draft() == 3
    with pytest.raises(BackendNotFound, match="abacus") as caught:
        backends.create_backend("abacus")
    assert "fake" in str(caught.value.hint)
