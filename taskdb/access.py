"""What both ends of a link need to know: addresses, certificates, the token. How a client gets in; `server/guard.py` is the door."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from taskdb.errors import AccessDenied, InvalidRequest

#: The name under which a call carries the token, as in HTTP.
TOKEN_KEY = "authorization"
_BEARER = "Bearer "
#: Characters of a token: fewer can be guessed; more do not fit beside other metadata.
TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 1024

Scheme = Literal["tcp", "tls", "unix"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a daemon is: `tcp` and `tls` have host and port, `unix` a path."""

    scheme: Scheme
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def target(self) -> str:
        """As gRPC writes it."""
        return f"unix:{self.path}" if self.scheme == "unix" else f"{self.host}:{self.port}"

    @property
    def bare_host(self) -> str:
        """Without the brackets of an IPv6 address."""
        return self.host.strip("[]")

    def __str__(self) -> str:
        return f"tls://{self.target}" if self.scheme == "tls" else self.target


def parse_address(text: str) -> Address:
    """HOST:PORT, tcp://HOST:PORT, tls://HOST:PORT or unix:PATH. Raises InvalidRequest with one line."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path:
            raise InvalidRequest(f"{text!r} names no socket: unix:PATH")
        return Address("unix", path=path)
    scheme: Scheme = "tls" if text.startswith("tls://") else "tcp"
    rest = text.removeprefix(f"{scheme}://")
    host, _, port = rest.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit()) or int(port) > 65535 or (":" in host and host[0] != "["):
        raise InvalidRequest(f"{text!r} is not an address: HOST:PORT, tls://HOST:PORT or unix:PATH")
    return Address(scheme, host, int(port))


@dataclass(frozen=True, slots=True)
class Access:
    """What a client shows, and whom it trusts. Each of the first three is the path of a PEM file, or the PEM text itself.

    The token is read for every call, so that a changed file is taken up.
    """

    #: Certificates that vouch for the daemon's. Needed for tls://.
    ca: str | None = field(default=None, repr=False)
    #: What the client shows, if the daemon asks for certificates; `key` may stand in the file of `cert`.
    cert: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)
    #: The name in the daemon's certificate, if it is not the host of its address.
    name: str | None = None
    token_file: str | None = None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries. Raises AccessDenied if the token cannot be read."""
        if self.token_file is None:
            return ()
        return ((TOKEN_KEY, _BEARER + read_token(self.token_file)),)


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon as a client knows it. With no more than an address: one on a Unix socket or loopback."""

    address: str
    access: Access = Access()

    def __str__(self) -> str:
        return self.address

    @classmethod
    def at(cls, where: str | Daemon) -> Daemon:
        return cls(where) if isinstance(where, str) else where


def token_of(metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
    """The token a call carries."""
    for name, value in metadata:
        if name == TOKEN_KEY and isinstance(value, str) and value.startswith(_BEARER):
            return value.removeprefix(_BEARER)
    return None


def read_token(path: str | Path) -> str:
    """Raises AccessDenied, in words that do not hold it."""
    try:
        token = Path(path).read_text("ascii").strip()
    except UnicodeDecodeError:
        raise AccessDenied(f"the token in {path} is not plain text") from None
    except OSError as error:
        raise AccessDenied(f"cannot read the token in {path}: {error.strerror}") from None
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX or not token.isprintable() or " " in token:
        raise AccessDenied(
            f"the token in {path} is one word of {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} characters; it has {len(token)}, or other signs"
        )
    return token


def read_pem(source: str, what: str) -> bytes:
    """The bytes of a file, or of PEM text. Raises AccessDenied."""
    if "\n" in source:
        return source.encode()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise AccessDenied(f"cannot read the {what} {source}: {error.strerror}") from None


def read_chain(cert: str, key: str | None) -> tuple[bytes, bytes]:
    """(certificates, private key), checked: they can be read and belong together. Raises AccessDenied."""
    chain = read_pem(cert, "certificate")
    private = chain if key is None else read_pem(key, "private key")
    if "\n" in cert or (key is not None and "\n" in key):
        return chain, private  # Python's checks need files; gRPC refuses what does not belong together
    try:
        # Without a password nobody is asked for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError, OSError) as error:
        raise AccessDenied(f"{cert} and {key or 'the key in it'} are no certificate with its private key ({_words(error)})") from None
    return chain, private


def check_ca(ca: str) -> bytes:
    """Raises AccessDenied if no certificate can be read."""
    data = read_pem(ca, "certificate authority")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        name = "the text of the certificate authority" if "\n" in ca else ca
        raise AccessDenied(f"{name} holds no certificate ({_words(error)})") from None
    return data


def _words(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or type(error).__name__
