"""Where the daemon may listen: loopback and sockets as they are, others only guarded, or said aloud."""

from __future__ import annotations

import logging
import socket
import stat
from pathlib import Path

import pytest

from taskdb.client import Client
from taskdb.config import AccessConfig
from taskdb.errors import InvalidRequest
from taskdb.server.listening import AddressInUse, NotSafe, check
from tests.support.certificates import Authority
from tests.taskdb.server.procs import Daemon, run

TOKEN = "sesame-0123456789"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    authority = Authority(tmp_path_factory.mktemp("listening"))
    pair = authority.vouch("daemon", "127.0.0.1")
    return {"cert": pair.cert, "key": pair.key, "ca": authority.cert}


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.8.8:0", "localhost:0", "tcp://127.0.0.1:0"])
def test_loopback_may_be_listened_on(listen: str) -> None:
    check(listen, AccessConfig())


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
@pytest.mark.parametrize("access", [AccessConfig(), AccessConfig(token=TOKEN)], ids=["bare", "token"])
def test_other_addresses_may_not(listen: str, access: AccessConfig) -> None:
    with pytest.raises(NotSafe, match="no encryption") as caught:
        check(listen, access)
    words = str(caught.value)
    assert "\n" not in words
    for remedy in ("--tls-cert", "--token-file", "--tls-ca-file", "--insecure", "127.0.0.1", "unix:"):
        assert remedy in words
    assert TOKEN not in words


def test_tls_alone_is_not_enough(tls: dict[str, str]) -> None:
    with pytest.raises(NotSafe, match="clients are not known"):
        check("tls://0.0.0.0:0", AccessConfig(tls["cert"], tls["key"]))


def test_tls_with_a_token_or_clients_certificates_is(tls: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    check("0.0.0.0:0", AccessConfig(tls["cert"], tls["key"], token=TOKEN))
    check("tls://0.0.0.0:0", AccessConfig(tls["cert"], tls["key"], tls["ca"]))
    assert not caplog.records


@pytest.mark.parametrize("access", [AccessConfig(insecure=True), AccessConfig(token=TOKEN, insecure=True)], ids=["bare", "token"])
def test_insecure_is_said_aloud(access: AccessConfig, caplog: pytest.LogCaptureFixture) -> None:
    check("0.0.0.0:0", access)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "0.0.0.0:0" in record.getMessage()
    assert TOKEN not in record.getMessage()
    check("127.0.0.1:0", access)
    assert len(caplog.records) == 1, "nothing is insecure about loopback"


def test_halves_are_refused(tls: dict[str, str], tmp_path: Path) -> None:
    for listen, access in (
        ("127.0.0.1:0", AccessConfig(key=tls["key"])),
        ("127.0.0.1:0", AccessConfig(ca=tls["ca"])),
        ("tls://127.0.0.1:0", AccessConfig(token=TOKEN)),
        (f"unix:{tmp_path / 'sock'}", AccessConfig(tls["cert"], tls["key"])),
    ):
        with pytest.raises(NotSafe):
            check(listen, access)


def test_a_name_that_is_none() -> None:
    with pytest.raises(InvalidRequest, match="is not an address"):
        check("no-such-host.invalid:7070", AccessConfig())


def test_an_address_of_another_machine() -> None:
    with pytest.raises(AddressInUse, match=r"cannot listen on 192\.0\.2\.1:7070: cannot assign"):
        check("192.0.2.1:7070", AccessConfig(insecure=True))


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for listen in (f"127.0.0.1:{port}", f"localhost:{port}"):
            with pytest.raises(AddressInUse) as caught:
                check(listen, AccessConfig())
            assert str(caught.value) == f"cannot listen on {listen}: address in use; choose another with --listen"
    check(f"127.0.0.1:{port}", AccessConfig())


@pytest.mark.e2e
def test_a_daemon_that_cannot_listen_says_so_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("serve", "--data", str(tmp_path / "new"), "--listen", listen)
    assert done.returncode == 1
    assert done.stderr == f"Error: cannot listen on {listen}: address in use; choose another with --listen\n"
    assert not (tmp_path / "new").exists()
    done = run("serve", "--data", str(tmp_path / "new"), "--listen", "0.0.0.0:0")
    assert done.returncode == 2
    assert "--insecure" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.e2e
def test_the_warning_and_the_rights_of_a_new_store(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--insecure", listen="0.0.0.0:0") as daemon:
        assert "WARNING" in daemon.words()
        assert "--insecure" in daemon.words()
        assert stat.S_IMODE(daemon.data.stat().st_mode) == 0o700


@pytest.mark.e2e
def test_what_the_environment_says_to_clients_is_not_for_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may start a daemon of its own in it."""
    for name in ("TLS_CERT", "TLS_KEY", "TLS_CA_FILE", "TOKEN_FILE", "INSECURE"):
        monkeypatch.setenv(f"TASKDB_{name}", "no-such-file")
    with Daemon(tmp_path) as daemon, Client(daemon.address) as client:
        client.status()
