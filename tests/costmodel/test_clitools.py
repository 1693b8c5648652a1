from __future__ import annotations

import json
import warnings

import click
import numpy as np
import pytest
from click.testing import CliRunner

from costmodel.clitools import POSITIVE, TreebudgetGroup, check_output, emit_json, json_option, progress, quiet_option
from profiles.errors import TreebudgetError, UsageError


@click.group(cls=TreebudgetGroup)
def main() -> None:
    """A group."""


@main.command()
@click.argument("what")
def fail(what: str) -> None:
    raise {
        "library": TreebudgetError("it broke", hint="mend it"),
        "usage": UsageError("wrong question"),
        "file": FileNotFoundError(2, "No such file", "gone.json"),
        "interrupt": KeyboardInterrupt(),
        "bug": ZeroDivisionError(),
    }[what]


@main.command()
@click.option("--seconds", type=POSITIVE)
def spend(seconds: float) -> None:
    assert seconds > 0


@main.command()
@json_option
@quiet_option
def work(as_json: bool, quiet: bool) -> None:
    with progress("working", 3, quiet) as advance:
        for _ in range(3):
            advance(1, note="step")
    emit_json({"a": np.float64(1.5), "b": np.arange(2), "c": float("nan"), "d": (True, None), "json": as_json})


@pytest.mark.parametrize(("what", "code"), [("library", 1), ("usage", 2), ("file", 1), ("interrupt", 130)])
def test_errors_become_messages_and_exit_codes(what, code):
    result = CliRunner().invoke(main, ["fail", what])
    assert result.exit_code == code and result.stdout == "" and "Traceback" not in result.stderr
    assert ("hint: mend it" in result.stderr) == (what == "library")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "x"])
def test_a_number_of_an_option_is_finite_and_in_its_range(value):
    result = CliRunner().invoke(main, ["spend", "--seconds", value])
    assert result.exit_code == 2 and "--seconds" in result.stderr
    assert CliRunner().invoke(main, ["spend", "--seconds", "1e-3"]).exit_code == 0


def test_only_what_goes_on_later_says_so():
    assert "kept" not in CliRunner().invoke(main, ["fail", "interrupt"]).stderr
    main.resumable = ("fail",)
    assert "run the same command again to go on" in CliRunner().invoke(main, ["fail", "interrupt"]).stderr
    main.resumable = ()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    check_output(None)
    check_output(tmp_path / "new" / "file.json")
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below.json"):
        with pytest.raises(UsageError, match="cannot be written"):
            check_output(path)


def test_a_bug_keeps_its_traceback():
    assert isinstance(CliRunner().invoke(main, ["fail", "bug"]).exception, ZeroDivisionError)


def test_one_json_document_on_stdout_and_progress_on_stderr():
    result = CliRunner().invoke(main, ["work", "--json"])
    assert json.loads(result.stdout) == {"a": 1.5, "b": [0, 1], "c": None, "d": [True, None], "json": True}
    assert "working" in result.stderr
    assert CliRunner().invoke(main, ["work", "--quiet"]).stderr == ""


def test_warnings_of_the_libraries_are_one_line_each():
    @click.group(cls=TreebudgetGroup)
    def main():
        pass

    @main.command()
    def run():
        warnings.warn("a context of 203 tokens lies outside", stacklevel=1)
        warnings.warn("leave the usual ones as they are", DeprecationWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = CliRunner().invoke(main, ["run"])
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == "warning: a context of 203 tokens lies outside"
    assert "test_clitools.py" not in result.stderr.splitlines()[0]
