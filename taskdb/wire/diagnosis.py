"""Why a daemon that is there does not let us in. gRPC only says that no connection came about; so it is tried once more."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

from taskdb.access import Access, Address, Daemon, check_ca, parse_address
from taskdb.errors import AccessDenied

#: For all of it.
_SECONDS = 3.0
#: How long a daemon that has shaken hands may take to say that it does not like our certificate.
_ALERT_SECONDS = 0.5
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


async def why_closed(daemon: Daemon) -> AccessDenied | None:
    """`why` in a thread."""
    return await asyncio.to_thread(why, daemon)


def why(daemon: Daemon) -> AccessDenied | None:
    """None if there is no daemon, or nothing is wrong with how we come. Takes some seconds at most."""
    where = parse_address(daemon.address)
    if where.scheme == "unix":
        return _why_socket(where)
    with suppress(OSError), socket.create_connection((where.bare_host, where.port), timeout=_SECONDS) as connection:
        return _why_plain(where, connection) if where.scheme == "tcp" else _why_tls(where, daemon.access, connection)
    return None


def _why_socket(where: Address) -> AccessDenied | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_SECONDS)
        try:
            connection.connect(where.path)
        except PermissionError:
            return AccessDenied(f"the socket {where.path} is for the user who runs the daemon")
        except OSError:
            pass
    return None


def _why_plain(where: Address, connection: socket.socket) -> AccessDenied | None:
    context = _context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with context.wrap_socket(connection):
            pass
    except ssl.SSLError as error:
        if not _is_alert(error):
            return None
    return AccessDenied(f"the daemon at {where} speaks TLS: say tls://{where.target}, and name the authority of its certificate")


def _why_tls(where: Address, access: Access, connection: socket.socket) -> AccessDenied | None:
    assert access.ca is not None
    context = _context()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # gRPC is not that strict
    name = access.name or where.bare_host
    try:
        context.load_verify_locations(cadata=check_ca(access.ca).decode("ascii"))
        if access.cert is not None and "\n" not in access.cert:
            context.load_cert_chain(access.cert, access.key, password=lambda: "")
        with context.wrap_socket(connection, server_hostname=name) as secured:
            # Since TLS 1.3 a client's certificate is judged after the handshake.
            secured.settimeout(_ALERT_SECONDS)
            with suppress(TimeoutError):
                if not secured.recv(1):
                    return _not_taken(where, access)
    except ssl.SSLCertVerificationError as error:
        if "match" in error.verify_message:
            return AccessDenied(
                f"the daemon at {where} is certified, but not as {name}: if its certificate has another name, say that one as the TLS name"
            )
        return AccessDenied(f"the daemon at {where} shows a certificate that is not trusted: {error.verify_message}")
    except ssl.SSLError as error:
        if error.reason in _NO_TLS:
            return AccessDenied(f"the daemon at {where} does not speak TLS")
        if _is_alert(error):
            return _not_taken(where, access)
    except ConnectionResetError:
        return _not_taken(where, access)
    return None


def _not_taken(where: Address, access: Access) -> AccessDenied:
    if access.cert is None:
        return AccessDenied(f"the daemon at {where} asks for a certificate: name one, and its key")
    return AccessDenied(f"the daemon at {where} does not take our certificate: it is out of date, or of an authority it does not know")


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    return context


def _is_alert(error: ssl.SSLError) -> bool:
    return "ALERT" in (error.reason or "")
