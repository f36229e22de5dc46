"""Who gets in: tokens and certificates that are right, wrong, missing, out of date. What is refused is said in one line."""

from __future__ import annotations

import asyncio
import hmac
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from taskdb import limits
from taskdb.access import Access
from taskdb.access import Daemon as Known
from taskdb.client import Client, Session
from taskdb.errors import AccessDenied, Unavailable
from taskdb.ingest import Ingest
from taskdb.server.guard import Guard
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from taskdb.wire.channel import CLIENT_OPTIONS, open_blocking_channel
from tests.support.certificates import Authority, Pair
from tests.taskdb.server.procs import PATIENCE_SECONDS, Daemon, Recorder, begin, graph, key, run, run_of, until, until_async

pytestmark = pytest.mark.e2e

TOKEN = "sesame-0123456789"
WRONG = "sesame-9876543210"


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


@pytest.fixture(scope="module")
def token_file(folder: Path) -> str:
    return written(folder / "token", TOKEN + "\n")


@pytest.fixture(scope="module")
def wrong_file(folder: Path) -> str:
    return written(folder / "wrong-token", WRONG)


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder, "stranger")


@pytest.fixture(scope="module")
def ours(authority: Authority) -> Pair:
    return authority.vouch("scheduler")


# ------------------------------------------------------------------------------------------------------------- tokens


@pytest.fixture(scope="module")
def asking(folder: Path, token_file: str) -> Iterator[Daemon]:
    """A daemon on loopback that asks for a token."""
    (folder / "asking").mkdir()
    with Daemon(folder / "asking", "--token-file", token_file, listen="127.0.0.1:0") as daemon:
        yield daemon


def test_a_scheduler_with_the_token_gets_in(asking: Daemon, token_file: str) -> None:
    async def story() -> None:
        known = Known(asking.address, Access(token_file=token_file))
        async with Recorder(known) as scheduler:
            await scheduler.ask(*graph("told", [key("told")]))
            await scheduler.durable()
            assert [x.found for x in await scheduler.session.get_tasks([key("told")])] == [True]
            assert (await scheduler.session.status()).tasks == 1
            assert [x async for x in scheduler.session.restore()]
            assert await asyncio.to_thread(sent, known, scheduler.session.epoch) == 1

    def sent(known: Known, epoch: int) -> int:
        with Ingest(known, epoch) as stream:
            stream.begin(begin("sent"))
            stream.add(run_of("sent", [key("sent")]))
            return stream.seal()

    asyncio.run(story())


def no_token(_: str) -> Access:
    return Access()


def wrong_token(wrong: str) -> Access:
    return Access(token_file=wrong)


@pytest.mark.parametrize("shown", [no_token, wrong_token])
def test_without_the_token_nothing_is_answered(asking: Daemon, wrong_file: str, shown: Callable[[str], Access]) -> None:
    known = Known(asking.address, shown(wrong_file))
    with Client(known) as client, pytest.raises(AccessDenied, match="token"):
        client.status()
    with Ingest(known, 1) as stream, pytest.raises(AccessDenied, match="token"):
        stream.begin(begin("no"))
    recorder = Recorder(known)
    began = time.monotonic()
    with pytest.raises(AccessDenied, match="token"):
        asyncio.run(recorder.session.attach(PATIENCE_SECONDS))
    assert time.monotonic() - began < PATIENCE_SECONDS / 2, "it was tried again, which cannot help"


def test_every_method_asks_for_the_token(asking: Daemon) -> None:
    """Also those that are added later."""
    service = pb.DESCRIPTOR.services_by_name["TaskDB"]
    with grpc.insecure_channel(asking.address) as channel:
        for method in service.methods:
            make = channel.stream_stream if method.client_streaming else channel.unary_stream
            call: Any = make(f"/{service.full_name}/{method.name}")
            answer = call(iter([b""]) if method.client_streaming else b"", timeout=PATIENCE_SECONDS)
            with pytest.raises(grpc.RpcError):
                next(answer)
            assert answer.code() is grpc.StatusCode.UNAUTHENTICATED, method.name
        unknown = channel.unary_unary("/taskdb.v1.TaskDB/Nothing")
        with pytest.raises(grpc.RpcError) as caught:
            unknown(b"", timeout=PATIENCE_SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("value", ["", "Bearer ", f"Basic {TOKEN}", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN} ", "Bearer " + "x" * 2000])
def test_what_is_nearly_the_token_is_refused(asking: Daemon, value: str) -> None:
    with grpc.insecure_channel(asking.address) as channel, pytest.raises(grpc.RpcError) as caught:
        pb_grpc.TaskDBStub(channel).Status(pb.StatusRequest(), metadata=(("authorization", value),), timeout=PATIENCE_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_probes_need_no_token(asking: Daemon) -> None:
    with grpc.insecure_channel(asking.address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_probes_do_not_take_the_calls_of_others(asking: Daemon, token_file: str) -> None:
    async def story() -> None:
        channels = [grpc.aio.insecure_channel(asking.address, options=CLIENT_OPTIONS) for _ in range(5)]
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
            for channel in channels
            for _ in range(limits.CONNECTION_CALLS_MAX)
        ]
        over = [asyncio.ensure_future(watch.code()) for watch in watches]
        await until_async(lambda: sum(x.done() for x in over) == len(watches) - limits.PROBES_MAX, "all but some to be refused")
        assert (await asyncio.to_thread(status_of, asking, Access(token_file=token_file))).tasks >= 0
        for channel in channels:
            await channel.close()

    asyncio.run(story())


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(ours: bytes, theirs: bytes) -> bool:
        compared.append((len(ours), len(theirs)))
        return ours == theirs

    async def story() -> None:
        async def serve(_: object) -> None:
            return None

        for value in (TOKEN, WRONG, "x", "x" * 1000):
            details = SimpleNamespace(method="/taskdb.v1.TaskDB/Status", invocation_metadata=(("authorization", f"Bearer {value}"),))
            assert (await guard.intercept_service(serve, details) is None) == (value == TOKEN)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    guard = Guard(TOKEN)
    asyncio.run(story())
    assert compared == [(32, 32)] * 4


def test_the_command_line_shows_the_token(asking: Daemon, token_file: str, wrong_file: str) -> None:
    url = ("status", "--url", asking.address)
    assert run(*url, "--token-file", token_file).returncode == 0
    assert run(*url, TASKDB_TOKEN_FILE=token_file).returncode == 0
    for words in ((), ("--token-file", wrong_file)):
        refused = run(*url, *words)
        assert refused.returncode == 6
        assert refused.stderr.count("\n") == 1, refused.stderr
        assert refused.stderr.startswith("taskdb: ")
        assert "token" in refused.stderr
        assert WRONG not in refused.stderr


def test_a_daemon_that_comes_back_with_another_token_is_waited_for(tmp_path: Path) -> None:
    theirs, shown = tmp_path / "theirs", tmp_path / "shown"
    written(theirs, TOKEN)
    written(shown, TOKEN)

    async def story() -> None:
        async with Recorder(Known(daemon.address, Access(token_file=str(shown)))) as scheduler:
            daemon.kill()
            written(theirs, WRONG)
            daemon.start()
            await until_denied(scheduler)
            assert scheduler.states[-1][0] == "lost"
            written(shown, WRONG)
            await scheduler.told("live")
            assert len([x for x, _ in scheduler.states if x == "lost"]) == 2, "said more than once"

    async def until_denied(scheduler: Recorder) -> None:
        await until_async(lambda: any("token" in words for _, words in scheduler.states), "the refusal")

    with Daemon(tmp_path, "--token-file", str(theirs)) as daemon:
        asyncio.run(story())
        assert WRONG not in daemon.words()
        assert TOKEN not in daemon.words()


def test_refused_calls_do_not_fill_the_log(asking: Daemon) -> None:
    def told() -> int:
        return asking.words().count("refused")

    before = told()
    with grpc.insecure_channel(asking.address) as channel:
        stub = pb_grpc.TaskDBStub(channel)
        for _ in range(200):
            with pytest.raises(grpc.RpcError):
                stub.Status(pb.StatusRequest(), timeout=PATIENCE_SECONDS)
    assert told() - before <= 2
    assert "token" in asking.words()
    assert TOKEN not in asking.words()
    assert WRONG not in asking.words()


@pytest.mark.parametrize(
    ("text", "words"), [("", "characters"), ("short", "characters"), ("two words of a token", "characters"), ("é" * 20, "plain text")]
)
def test_a_token_that_is_none_is_refused_at_the_start(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "token").write_text(text, encoding="utf-8")
    args = ("--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "token"))
    done = run("serve", "--data", str(tmp_path / "data"), *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert not text or text not in done.stderr
    assert not (tmp_path / "data").exists()


# ------------------------------------------------------------------------------------------------------- certificates


@pytest.fixture(scope="module")
def mutual(folder: Path, authority: Authority) -> Iterator[Daemon]:
    """A daemon that shows a certificate, and asks for one."""
    pair = authority.vouch("daemon", "127.0.0.1", "daemon.example")
    (folder / "mutual").mkdir()
    words = ("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-ca-file", authority.cert)
    with Daemon(folder / "mutual", *words, listen="127.0.0.1:0") as daemon:
        yield daemon


def status_of(daemon: Daemon, access: Access, address: str = "") -> pb.StatusReply:
    with Client(Known(address or daemon.address, access), PATIENCE_SECONDS) as client:
        return client.status()


def refusal(daemon: Daemon, access: Access, address: str = "") -> str:
    with pytest.raises(AccessDenied) as caught:
        status_of(daemon, access, address)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_address_says_that_it_is_tls(mutual: Daemon) -> None:
    assert mutual.address.startswith("tls://127.0.0.1:")


def test_with_certificates_of_the_authority_all_is_well(mutual: Daemon, authority: Authority, ours: Pair) -> None:
    access = Access(authority.cert, ours.cert, ours.key)
    assert status_of(mutual, access).tasks >= 0

    async def story() -> None:
        async with Recorder(Known(mutual.address, access)) as scheduler:
            await scheduler.ask(*graph("secured", [key("secured")]))
            await scheduler.durable()

    asyncio.run(story())


def test_certificates_may_be_texts(mutual: Daemon, authority: Authority, ours: Pair) -> None:
    """As in Dask's temporary ones."""
    access = Access(*(Path(path).read_text() for path in (authority.cert, ours.cert, ours.key)))
    assert status_of(mutual, access).tasks >= 0
    assert "PRIVATE" not in repr(access)


def test_key_and_certificate_may_stand_in_one_file(mutual: Daemon, authority: Authority, ours: Pair, tmp_path: Path) -> None:
    both = written(tmp_path / "both.pem", Path(ours.key).read_text() + Path(ours.cert).read_text())
    assert status_of(mutual, Access(authority.cert, both)).tasks >= 0


def test_another_authority_is_not_believed(mutual: Daemon, stranger: Authority, ours: Pair) -> None:
    assert "not trusted" in refusal(mutual, Access(stranger.cert, ours.cert, ours.key))


def test_a_name_is_compared(mutual: Daemon, authority: Authority, ours: Pair) -> None:
    assert "not as other.example" in refusal(mutual, Access(authority.cert, ours.cert, ours.key, name="other.example"))
    assert status_of(mutual, Access(authority.cert, ours.cert, ours.key, name="daemon.example")).tasks >= 0
    assert "localhost" in refusal(mutual, Access(authority.cert, ours.cert, ours.key), mutual.address.replace("127.0.0.1", "localhost"))


def test_a_client_needs_a_certificate(mutual: Daemon, authority: Authority) -> None:
    assert "asks for a certificate" in refusal(mutual, Access(authority.cert))


def test_a_certificate_of_another_authority_is_not_taken(mutual: Daemon, authority: Authority, stranger: Authority) -> None:
    theirs = stranger.vouch("intruder")
    assert "does not take our certificate" in refusal(mutual, Access(authority.cert, theirs.cert, theirs.key))


def test_an_expired_certificate_is_not_taken(mutual: Daemon, authority: Authority) -> None:
    old = authority.vouch("old-scheduler", days=-1)
    assert "does not take our certificate" in refusal(mutual, Access(authority.cert, old.cert, old.key))


def test_who_speaks_no_tls_is_told(mutual: Daemon) -> None:
    assert "speaks TLS" in refusal(mutual, Access(), mutual.address.removeprefix("tls://"))


def test_who_speaks_tls_to_one_that_does_not_is_told(asking: Daemon, authority: Authority) -> None:
    assert "does not speak TLS" in refusal(asking, Access(authority.cert), f"tls://{asking.address}")


def test_a_scheduler_is_told_at_once(mutual: Daemon, stranger: Authority) -> None:
    recorder = Recorder(Known(mutual.address, Access(stranger.cert)))
    began = time.monotonic()
    with pytest.raises(AccessDenied, match="not trusted"):
        asyncio.run(recorder.session.attach(PATIENCE_SECONDS))
    assert time.monotonic() - began < PATIENCE_SECONDS / 2


def test_the_command_line_speaks_tls(mutual: Daemon, authority: Authority, stranger: Authority, ours: Pair) -> None:
    words = ("status", "--url", mutual.address, "--tls-cert", ours.cert, "--tls-key", ours.key)
    assert run(*words, "--tls-ca-file", authority.cert).returncode == 0
    refused = run(*words, "--tls-ca-file", stranger.cert)
    assert refused.returncode == 6
    assert refused.stderr.count("\n") == 1, refused.stderr


def test_certificates_are_renewed_while_it_runs(tmp_path: Path, authority: Authority, token_file: str) -> None:
    renewing = Authority(tmp_path)
    pair = renewing.vouch("daemon", "127.0.0.1", days=-1)
    access = Access(renewing.cert, token_file=token_file)
    words = ("--tls-cert", pair.cert, "--tls-key", pair.key, "--token-file", token_file)
    with Daemon(tmp_path, *words, listen="127.0.0.1:0") as daemon:
        assert "expired" in refusal(daemon, access)
        assert renewing.vouch("daemon", "127.0.0.1") == pair
        until(lambda: _answers(daemon, access), "the new certificate to be shown")
        assert "token" in refusal(daemon, Access(renewing.cert)), "TLS does not stand for the token"


def test_a_scheduler_whose_certificate_is_put_right_goes_on(tmp_path: Path, authority: Authority, stranger: Authority) -> None:
    ours, theirs = authority.vouch("renewed"), stranger.vouch("not-renewed")
    shown = Pair(str(tmp_path / "shown.pem"), str(tmp_path / "shown.key"))
    daemons = authority.vouch("daemon-2", "127.0.0.1")

    def show(pair: Pair) -> None:
        shutil.copy(pair.cert, shown.cert)
        shutil.copy(pair.key, shown.key)

    async def story() -> None:
        async with Recorder(Known(daemon.address, Access(authority.cert, shown.cert, shown.key))) as scheduler:
            daemon.kill()
            # The daemon takes another authority's certificates now.
            shutil.copy(stranger.cert, taken)
            daemon.start()
            await until_async(lambda: any("certificate" in words for _, words in scheduler.states), "the refusal")
            show(theirs)
            await scheduler.told("live")

    show(ours)
    taken = tmp_path / "taken.pem"
    shutil.copy(authority.cert, taken)
    words = ("--tls-cert", daemons.cert, "--tls-key", daemons.key, "--tls-ca-file", str(taken))
    with Daemon(tmp_path, *words, listen="127.0.0.1:0") as daemon:
        asyncio.run(story())


def _answers(daemon: Daemon, access: Access) -> bool:
    try:
        return status_of(daemon, access).tasks >= 0
    except AccessDenied:
        return False


def test_files_that_are_no_certificates_are_said(tmp_path: Path, authority: Authority, ours: Pair, mutual: Daemon) -> None:
    junk = written(tmp_path / "junk.pem", "nothing\nof the kind")
    other = authority.vouch("other")
    for access in (
        Access(str(tmp_path / "none.pem")),
        Access(junk),
        Access(authority.cert, junk, ours.key),
        Access(authority.cert, ours.cert, other.key),
        Access(),
    ):
        refusal(mutual, access)
    for words in (
        ("--tls-cert", junk),
        ("--tls-cert", ours.cert, "--tls-key", other.key),
        ("--tls-cert", ours.cert, "--tls-key", str(tmp_path / "none")),
        ("--tls-cert", ours.cert, "--tls-key", ours.key, "--tls-ca-file", junk),
    ):
        done = run("serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", *words)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "data").exists()


def test_where_there_is_no_daemon_nothing_is_denied(authority: Authority) -> None:
    with pytest.raises(Unavailable, match="no taskdb daemon"):
        status_of(None, Access(authority.cert), "tls://127.0.0.1:1")  # type: ignore[arg-type]


def test_a_channel_is_opened_without_a_daemon(authority: Authority) -> None:
    open_blocking_channel(Known("tls://127.0.0.1:1", Access(authority.cert))).close()
    assert Session("127.0.0.1:1", "s", on_result=print, on_state=print, held=list).address == "127.0.0.1:1"
