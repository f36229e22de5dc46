"""Settings: the schema says all that the defaults have, and a bad value gives one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import pytest
import yaml

import scheduler_adapter
from scheduler_adapter.config import DEFAULTS, AdapterConfig, register_defaults, scheduler_return_seconds

FOLDER = Path(scheduler_adapter.__file__).parent
SCHEMA = yaml.safe_load((FOLDER / "taskdb-schema.yaml").read_text())["properties"]["taskdb"]
SHIPPED = yaml.safe_load(DEFAULTS.read_text())["taskdb"]
FOR_WORKERS_AND_CLIENTS = {"scheduler-return", "scheduler-file"}
TYPES = {"string": str, "integer": int, "number": (int, float), "null": type(None)}


def test_schema_is_complete() -> None:
    assert set(SCHEMA["properties"]) == set(SHIPPED)
    assert SCHEMA["additionalProperties"] is False


@pytest.mark.parametrize("name", SHIPPED)
def test_schema_describes_the_default(name: str) -> None:
    said = SCHEMA["properties"][name]
    assert said["description"]
    kinds = said["type"] if isinstance(said["type"], list) else [said["type"]]
    assert isinstance(SHIPPED[name], tuple(t for k in kinds for t in (TYPES[k] if isinstance(TYPES[k], tuple) else (TYPES[k],))))
    if "minimum" in said and SHIPPED[name] is not None:
        assert SHIPPED[name] >= said["minimum"]


def test_every_setting_is_used() -> None:
    fields = set(AdapterConfig.__dataclass_fields__)
    for name in SHIPPED.keys() - FOR_WORKERS_AND_CLIENTS:
        plain = name.replace("-", "_")
        assert any(field == plain or field.startswith(plain) for field in fields), name


def test_defaults() -> None:
    config = AdapterConfig.load()
    assert (config.url, config.data, config.window) == (None, None, 10_000)
    assert (config.lookahead, config.flush_interval_ms, config.local_tasks) == (
        SHIPPED["lookahead"],
        SHIPPED["flush-interval"],
        SHIPPED["local-tasks"],
    )
    assert config.connect_timeout_seconds == 10
    assert config.local_bytes == 2**20


def test_what_the_user_set_is_kept() -> None:
    with dask.config.set({"taskdb.window": 7}):
        register_defaults()
        assert AdapterConfig.load().window == 7


def test_options_win_over_config_and_none_is_no_option() -> None:
    with dask.config.set({"taskdb.window": 7, "taskdb.url": "a:1"}):
        config = AdapterConfig.load(window=0, url=None)
    assert (config.window, config.url) == (0, "a:1")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dask.config.collect_env({"DASK_TASKDB__WINDOW": "16", "DASK_TASKDB__URL": "unix:x", "DASK_TASKDB__FLUSH_INTERVAL": "2.5"})
    with dask.config.set(found):
        config = AdapterConfig.load()
    assert (config.window, config.url, config.flush_interval_ms) == (16, "unix:x", 2.5)


def test_texts_with_units() -> None:
    with dask.config.set({"taskdb.connect-timeout": "2 minutes", "taskdb.local-bytes": "3 kiB"}):
        config = AdapterConfig.load()
    assert (config.connect_timeout_seconds, config.local_bytes) == (120, 3072)


BAD: list[Any] = [
    ("window", "many"),
    ("window", None),
    ("window", -1),
    ("window", [1]),
    ("lookahead", 0),
    ("lookahead", -5),
    ("lookahead", "x"),
    ("flush-interval", "soon"),
    ("flush-interval", -1),
    ("connect-timeout", "a while"),
    ("connect-timeout", -1),
    ("local-bytes", "some"),
    ("local-tasks", "few"),
    ("local-tasks", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_values_give_one_line(name: str, value: Any) -> None:
    with dask.config.set({f"taskdb.{name}": value}), pytest.raises(ValueError, match=r"taskdb") as caught:
        AdapterConfig.load()
    assert "\n" not in str(caught.value)


def test_what_workers_and_clients_read() -> None:
    assert scheduler_return_seconds() == 600
    with dask.config.set({"taskdb.scheduler-return": 1.5}):
        assert scheduler_return_seconds() == 1.5
    with dask.config.set({"taskdb.scheduler-return": "10min"}), pytest.raises(ValueError, match=r"^taskdb.scheduler-return is '10min'"):
        scheduler_return_seconds()


def test_a_window_that_is_no_whole_number_is_refused() -> None:
    with dask.config.set({"taskdb.window": 10.7}), pytest.raises(ValueError, match="window"):
        AdapterConfig.load()
