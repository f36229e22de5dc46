"""What the scheduler shows the daemon: its own settings, else what Dask has."""

from __future__ import annotations

from pathlib import Path

import dask
import pytest
from distributed.security import Security

from scheduler_adapter.access import daemon_at
from scheduler_adapter.config import AdapterConfig
from taskdb.access import Access, Daemon
from taskdb.errors import InvalidRequest
from tests.support.cluster import dask as dask_words
from tests.support.cluster import run
from tests.taskdb.server.procs import Daemon as Running

DASKS = Security(
    tls_ca_file="dask-ca", tls_scheduler_cert="dask-cert", tls_scheduler_key="dask-key", tls_client_cert="no", tls_worker_cert="no"
)


def found(url: str, security: Security, **settings: object) -> Daemon:
    with dask.config.set({f"taskdb.{name.replace('_', '-')}": value for name, value in settings.items()}):
        return daemon_at(url, AdapterConfig.load(), security)


def test_a_plain_address_is_shown_a_token_at_most() -> None:
    assert found("127.0.0.1:1", DASKS) == Daemon("127.0.0.1:1")
    assert found("unix:/run/taskdb", DASKS, token_file="t").access == Access(token_file="t")


def test_dasks_certificates_are_used() -> None:
    assert found("tls://db:1", DASKS, tls_name="db.example").access == Access("dask-ca", "dask-cert", "dask-key", "db.example")


def test_those_of_dasks_configuration_too() -> None:
    files = {"ca-file": "ca", "scheduler.cert": "cert", "scheduler.key": "key"}
    with dask.config.set({f"distributed.comm.tls.{name}": path for name, path in files.items()}):
        assert found("tls://db:1", Security()).access == Access("ca", "cert", "key")


def test_its_own_go_first() -> None:
    own = {"tls_ca_file": "own-ca", "tls_cert": "own-cert", "tls_key": "own-key", "token_file": "t"}
    assert found("tls://db:1", DASKS, **own).access == Access("own-ca", "own-cert", "own-key", None, "t")


def test_an_authority_of_its_own_means_tls() -> None:
    assert found("db:1", Security(), tls_ca_file="own-ca") == Daemon("tls://db:1", Access("own-ca"))


def test_temporary_certificates_of_dask_are_texts() -> None:
    access = found("tls://db:1", Security.temporary()).access
    assert access.ca is not None
    assert access.ca.startswith("-----BEGIN CERTIFICATE")
    assert "PRIVATE" not in repr(access)


@pytest.mark.parametrize("url", ["7070", "host", "host:port", "http://host:1", "host:70700", ":7070", "::1:7070", "unix:"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        found(url, Security())
    assert "\n" not in str(caught.value)


@pytest.mark.e2e
def test_a_scheduler_that_is_not_let_in_ends(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame-0123456789")
    with Running(tmp_path, "--token-file", str(tmp_path / "token"), listen="127.0.0.1:0") as daemon:
        words = ["--preload", "scheduler_adapter", "--taskdb-url", daemon.address, "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        done = run(dask_words("scheduler", *words), cwd=tmp_path)
    assert done.returncode == 1
    assert "taskdb: the scheduler cannot start: " in done.stderr
    assert "token" in done.stderr
