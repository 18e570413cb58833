"""The options of a job's run: what is right, and what each mistake is told."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sparrowrl.errors import ConfigError
from sparrowrl.job.options import Options

KEY = "--sparrow."


def test_defaults_and_all_that_can_be_given() -> None:
    assert Options.from_mapping(KEY, {}) == Options(KEY)
    given: dict[str, Any] = {
        "journal_dir": "/data/journal",
        "run": "run-7",
        "listen": "10.0.0.1",
        "address": "https://hub.example.org/sparrow",
        "port": 8590,
        "connections": 8,
        "codec": "fast",
        "in_flight": "drain",
        "audit_every": 10,
        "anchor_every": 50,
        "keep_versions": 100,
        "timeout": 60,
    }
    options = Options.from_mapping(KEY, given)
    assert {name: getattr(options, name) for name in Options.names()} == given


def test_what_is_read_from_yaml_is_a_mapping_too() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"journal_dir": None, "timeout": 5})
    assert Options.from_mapping(KEY, config) == Options(KEY, timeout=5)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("journal", "journal_dir"), ("adress", "address"), ("inflight", "in_flight"), ("timeout_s", "timeout")],
)
def test_a_key_that_is_none_is_told_the_closest_one_in_full(wrong: str, right: str) -> None:
    said = f"{KEY}{wrong}: there is no such option; write {KEY}{right}"
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        Options.from_mapping(KEY, {"run": "x", wrong: 1})


def test_a_key_like_no_other_is_told_all_of_them() -> None:
    with pytest.raises(ConfigError, match=re.escape("xyzzyx: there is no such option") + ".*journal_dir, run, listen"):
        Options.from_mapping(KEY, {"xyzzyx": 1})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("run", "../x", "A-Za-z0-9"),
        ("run", "", "A-Za-z0-9"),
        ("run", 7, "text"),
        ("run", None, "text"),
        ("journal_dir", 3, "text"),
        ("journal_dir", "journal", "an absolute path"),
        ("journal_dir", "", "an absolute path"),
        ("listen", "node-0", "an IP address"),
        ("listen", None, "text"),
        ("address", "node 0", "a host name"),
        ("address", "node-0:8590", "a host name"),
        ("address", "ftp://node-0", "a host name"),
        ("address", "http://", "a host name"),
        ("address", "http://node:port", "a host name"),
        ("port", 65536, "a whole number, 0 to 65535"),
        ("port", -1, "a whole number, 0 to 65535"),
        ("port", "8590", "a whole number"),
        ("connections", 0, "a whole number, at least 1"),
        ("connections", 1.5, "a whole number"),
        ("connections", True, "a whole number"),
        ("codec", "compact", "fast"),
        ("in_flight", "abort", "keep or drain"),
        ("in_flight", True, "text"),
        ("audit_every", -1, "at least 0"),
        ("anchor_every", -1, "at least 0"),
        ("keep_versions", None, "at least 0"),
        ("timeout", 0, "at least 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_right(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(KEY + name) + ": expected .*" + re.escape(expected)) as raised:
        Options.from_mapping(KEY, {name: value})
    assert f"got {value!r}" in str(raised.value)


@pytest.mark.parametrize("value", ["true", 1, ["run"]])
def test_a_value_where_options_should_be_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="expected options below it"):
        Options.from_mapping(KEY, value)


@pytest.mark.parametrize(
    ("options", "url", "only_here"),
    [
        ({}, "http://127.0.0.1:99", True),
        ({"listen": "localhost"}, "http://localhost:99", True),
        ({"listen": "::1"}, "http://[::1]:99", True),
        ({"listen": "10.0.0.1"}, "http://10.0.0.1:99", False),
        ({"listen": "0.0.0.0"}, "http://10.9.9.9:99", False),
        ({"listen": "::"}, "http://10.9.9.9:99", False),
        ({"listen": "0.0.0.0", "address": "node-0"}, "http://node-0:99", False),
        ({"listen": "0.0.0.0", "address": "fd00::7"}, "http://[fd00::7]:99", False),
        ({"address": "node-0"}, "http://node-0:99", True),
        ({"address": "https://hub.example.org/x/"}, "https://hub.example.org/x", False),
    ],
)
def test_what_engines_connect_to(options: dict[str, Any], url: str, only_here: bool) -> None:
    made = Options.from_mapping(KEY, options)
    assert made.url(99, own_ip="10.9.9.9") == url
    assert made.only_here is only_here
