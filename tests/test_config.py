from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparrowrl.config import Credentials, EngineConfig
from sparrowrl.errors import ConfigError

NEEDED = {"SPARROWRL_HUB": "http://127.0.0.1:1/", "SPARROWRL_TOKEN_FILE": "/tokens.json"}


def test_credentials_come_back_as_saved_and_stay_secret(tmp_path: Path) -> None:
    made = Credentials.new("run-1")
    made.save(tmp_path / "c.json")
    assert (tmp_path / "c.json").stat().st_mode & 0o777 == 0o600
    assert Credentials.load(tmp_path / "c.json") == made
    with pytest.raises(FileExistsError):
        made.save(tmp_path / "c.json")
    engine = made.for_engines()
    assert (engine.writer, engine.reader, engine.run_key) == (None, made.reader, made.run_key)
    for secret in (made.reader, str(made.writer), made.run_key.hex(), repr(made.run_key)):
        assert secret not in repr(made)


@pytest.mark.parametrize("run", ["", "../x", "a b", "-a", "a" * 65])
def test_a_bad_run_name_is_refused(run: str) -> None:
    with pytest.raises(ConfigError, match="run name"):
        Credentials.new(run)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../x"},
        {"run_key": "00"},
        {"run_key": "zz" * 32},
        {"run_key": 3},
        {"reader": ""},
        {"run": None},
        {"writer": ""},
        {"reader": "a b"},
        None,
    ],
)
def test_a_credentials_file_of_another_form_is_refused(tmp_path: Path, change: dict[str, object] | None) -> None:
    good = {"run": "run-1", "run_key": "ab" * 32, "reader": "r"}
    (tmp_path / "c.json").write_text("[]" if change is None else json.dumps({**good, **change}))
    with pytest.raises(ConfigError, match=r"c\.json"):
        Credentials.load(tmp_path / "c.json")


def test_a_credentials_file_of_brackets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"c\.json"):
        Credentials.load(tmp_path / "c.json")


def test_a_missing_credentials_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sparrowrl init"):
        Credentials.load(tmp_path / "nothing.json")


def test_the_environment_of_an_engine() -> None:
    plain = EngineConfig.from_environment(NEEDED)
    assert (plain.hub, plain.in_flight, plain.connections, plain.audit_every) == ("http://127.0.0.1:1", "keep", 4, 0)
    assert plain.engine_id.startswith("engine-")
    full = EngineConfig.from_environment(
        {
            **NEEDED,
            "SPARROWRL_ENGINE_ID": "e-1",
            "SPARROWRL_IN_FLIGHT": "drain",
            "SPARROWRL_AUDIT_EVERY": "10",
            "SPARROWRL_CONNECTIONS": "8",
            "SPARROWRL_START_TIMEOUT": "60",
            "SPARROWRL_EXPORT_DIR": "/exports",
            "SPARROWRL_DRAIN_TIMEOUT": "20",
            "SPARROWRL_UNTESTED_VLLM": "1",
        }
    )
    assert full == EngineConfig(
        "http://127.0.0.1:1", Path("/tokens.json"), "e-1", "drain", 10, 8, 60, Path("/exports"), 20
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPARROWRL_HUB", ""),
        ("SPARROWRL_TOKEN_FILE", ""),
        ("SPARROWRL_IN_FLIGHT", "stop"),
        ("SPARROWRL_ENGINE_ID", "a/b"),
        ("SPARROWRL_AUDIT_EVERY", "-1"),
        ("SPARROWRL_CONNECTIONS", "0"),
        ("SPARROWRL_CONNECTIONS", "four"),
        ("SPARROWRL_START_TIMEOUT", "1.5"),
        ("SPARROWRL_DRAIN_TIMEOUT", "soon"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_environment({**NEEDED, name: value})
