"""Where the daemon may listen, and how it begins to. By default nobody but the machine's own users, or the owner, can reach it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from taskdb.access import Address, check_ca, parse_address, read_chain
from taskdb.config import AccessConfig
from taskdb.errors import AccessDenied, InvalidRequest

logger = logging.getLogger("taskdb.server")


class AddressInUse(Exception):
    """The address cannot be listened on. Says why and what to do."""


class NotSafe(Exception):
    """The address is not to be listened on like that. Says why and what to do."""


# ----------------------------------------------------------------------------------------------------- may it be done


def check(listen: str, access: AccessConfig) -> None:
    """Raises NotSafe, AddressInUse, AccessDenied (certificates that cannot be read), InvalidRequest. Leaves nothing behind.

    IMPORTANT: before the store is opened, so that a daemon that cannot listen makes none.
    """
    address = parse_address(listen)
    _check_safe(address, access)
    if access.tls:
        _credentials(access)
    if address.scheme == "unix":
        _check_socket(Path(address.path))
    else:
        _check_port(address)


def _check_safe(address: Address, access: AccessConfig) -> None:
    if access.key is not None and access.cert is None:
        raise NotSafe("--tls-key is the key of a certificate: name that with --tls-cert")
    if access.ca is not None and access.cert is None:
        raise NotSafe("--tls-ca-file is for clients' certificates: the daemon needs one of its own, --tls-cert and --tls-key")
    if address.scheme == "unix":
        if access.tls:
            raise NotSafe(f"{address} is a Unix socket, which takes no TLS: its file's rights guard it")
        return
    if address.scheme == "tls" and not access.tls:
        raise NotSafe(f"{address} needs a certificate: --tls-cert and --tls-key")
    if _is_loopback(address):
        return
    guarded = access.tls and (access.token is not None or access.ca is not None)
    if guarded:
        return
    lacks = "no encryption" if not access.tls else "clients are not known: no token, no certificates of theirs"
    if not access.insecure:
        remedy = "" if access.tls else "--tls-cert and --tls-key with "
        raise NotSafe(
            f"cannot listen on {address}: others can reach it, and {lacks}. Add {remedy}--token-file or --tls-ca-file, or say --insecure;"
            " or listen on 127.0.0.1 or unix:PATH"
        )
    logger.warning("listening on %s though %s: who can reach it can run code on the workers (--insecure)", address, lacks)


def check_metrics(listen: str, access: AccessConfig) -> None:
    """Raises NotSafe, InvalidRequest. Neither TLS nor the token guards metrics, so only the machine's own users get them by default."""
    address = parse_address(listen)
    if _is_loopback(address):
        return
    if not access.insecure:
        raise NotSafe(
            f"cannot serve metrics on {address}: others can reach it, and neither TLS nor a token guards them. Say --insecure, or"
            " serve them on 127.0.0.1"
        )
    logger.warning("metrics on %s: who can reach it can read them (--insecure)", address)


def _is_loopback(address: Address) -> bool:
    hosts = {info[4][0] for info in _resolve(address)}
    return all(ipaddress.ip_address(str(host).partition("%")[0]).is_loopback for host in hosts)


def _resolve(address: Address) -> list[Any]:
    try:
        return socket.getaddrinfo(address.bare_host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidRequest(f"{address.host!r} is not an address: {error.strerror}") from None


def _check_port(address: Address) -> None:
    """gRPC says in many lines, and less well, why it cannot have a port."""
    wrong: OSError | None = None
    free = 0
    for family, kind, protocol, _, where in _resolve(address):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
                probe.listen(1)
                free += 1
            except OSError as error:
                wrong = error
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    free = 0
                    break
    if wrong is not None and not free:
        words = "address in use" if wrong.errno == errno.EADDRINUSE else (os.strerror(wrong.errno) if wrong.errno else str(wrong)).lower()
        raise AddressInUse(f"cannot listen on {address}: {words}; choose another with --listen")


def _check_socket(path: Path) -> None:
    """A socket file nobody listens on may stay from a daemon that was killed. Anything else under that name is left alone."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressInUse(f"cannot listen on unix:{path}: there is a file that is no socket; choose another with --listen")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except OSError as error:
            raise AddressInUse(f"cannot listen on unix:{path}: {error.strerror or error}") from error
    raise AddressInUse(f"cannot listen on unix:{path}: another process listens on it; choose another with --listen")


# ------------------------------------------------------------------------------------------------------------ doing it


@contextlib.contextmanager
def listening(server: grpc.aio.Server, listen: str, access: AccessConfig) -> Iterator[str]:
    """Bind; the address with its real port. A socket file has owner-only rights from its first moment, and is removed."""
    address = parse_address(listen)
    if address.scheme != "unix":
        scheme = "tls://" if access.tls else ""
        yield f"{scheme}{address.host}:{_bind(server, address, access)}"
        return
    path = Path(address.path)
    _check_socket(path)
    path.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        _bind(server, address, access)
    finally:
        os.umask(mask)
    path.chmod(0o600)
    try:
        yield str(address)
    finally:
        path.unlink(missing_ok=True)


def _bind(server: grpc.aio.Server, address: Address, access: AccessConfig) -> int:
    try:
        if access.tls:
            port: int = server.add_secure_port(address.target, _credentials(access))
        else:
            port = server.add_insecure_port(address.target)
    except RuntimeError:
        port = 0
    if not port:
        raise AddressInUse(f"cannot listen on {address}: address in use; choose another with --listen")
    return port


def _credentials(access: AccessConfig) -> Any:
    """Certificates that are renewed on disk are shown to, and asked of, who connects next."""
    stamp = _stamp(access)

    def renewed() -> Any:
        nonlocal stamp
        now = _stamp(access)
        if now is None or now == stamp:
            return None
        try:
            configuration = _configuration(access)
        except AccessDenied as error:  # half of it is written: the next one looks again
            logger.warning("the certificates have changed, and are not taken: %s", error)
            return None
        stamp = now
        return configuration

    return grpc.dynamic_ssl_server_credentials(_configuration(access), renewed, require_client_authentication=access.ca is not None)


def _configuration(access: AccessConfig) -> Any:
    assert access.cert is not None
    chain, key = read_chain(access.cert, access.key)
    return grpc.ssl_server_certificate_configuration([(key, chain)], None if access.ca is None else check_ca(access.ca))


def _stamp(access: AccessConfig) -> tuple[int, ...] | None:
    try:
        return tuple(os.stat(path).st_mtime_ns for path in (access.cert, access.key, access.ca) if path is not None)
    except OSError:
        return None
