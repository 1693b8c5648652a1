from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from costmodel import backend as backends
from costmodel import cli, cliprofile
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


class Ranks(FakeBackend):
    """One of two processes: rank 0 leads, rank 1 follows."""

    def __init__(self, rank: int) -> None:
        super().__init__(VirtualClock())
        self.rank = rank
        self.log: list[str] = []

    def lead(self) -> Ranks:
        self.log.append("lead")
        return self

    def follow(self) -> None:
        self.log.append("follow")

    def close(self) -> None:
        self.log.append("close")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_leads_writes_and_lets_the_others_go(rank, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", str(rank))
    engine, out = Ranks(rank), tmp_path / "tp.json"
    real = cliprofile.profile_backend
    monkeypatch.setattr(cliprofile, "create_backend", lambda name, **options: engine)
    monkeypatch.setattr(cliprofile, "profile_backend", lambda *args, **options: real(*args, clock=engine.clock, **options))
    result = CliRunner().invoke(cli.main, ["profile", "--tp", "2", "--rounds", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert engine.log == (["lead", "close"] if rank == 0 else ["follow"])
    assert out.exists() == (rank == 0) and bool(result.output) == (rank == 0)


def test_the_other_ranks_are_let_go_when_profiling_fails(monkeypatch, tmp_path):
    engine = Ranks(0)
    engine.rows = lambda t: t + 1
    monkeypatch.setattr(cliprofile, "create_backend", lambda name, **options: engine)
    result = CliRunner().invoke(cli.main, ["profile", "--tp", "2", "--out", str(tmp_path / "x.json")])
    assert result.exit_code == 1 and engine.log == ["lead", "close"]


def test_modes_reach_the_backend_and_have_files_of_their_own(monkeypatch, tmp_path):
    seen: dict = {}
    engine = FakeBackend(VirtualClock())
    real = cliprofile.profile_backend
    monkeypatch.setenv("TREEBUDGET_CACHE", str(tmp_path))
    monkeypatch.setattr(cliprofile, "create_backend", lambda name, **options: seen.update(options) or engine)
    monkeypatch.setattr(cliprofile, "profile_backend", lambda *args, **options: real(*args, clock=engine.clock, **options))
    arguments = "profile --mode captured --captured-sizes 1,2,4 --batch 1,2 --verify-tokens 1-4 --quiet"
    result = CliRunner().invoke(cli.main, arguments.split())
    assert result.exit_code == 0, result.output
    assert (seen["mode"], seen["captured_sizes"]) == ("captured", (1, 2, 4))
    assert result.stdout.strip().endswith("_bfloat16_captured.json")
    assert CliRunner().invoke(cli.main, ["profile", "--captured-sizes", "1,2"]).exit_code == 2
