"""Certificates for tests: an authority, and what it vouches for. Elliptic curves, because they are made at once."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and its private key."""

    cert: str
    key: str


class Authority:
    """Signs certificates, and keeps them all in one folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = self._sign(self._name, self._key, days=30, extensions=[x509.BasicConstraints(ca=True, path_length=None)])
        #: Path of its own certificate.
        self.cert = str(folder / f"{name}.pem")
        Path(self.cert).write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def vouch(self, name: str, *hosts: str, days: int = 30) -> Pair:
        """A certificate for these hosts that is valid for so many days; if they are negative, it was, that long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_host(host) for host in hosts or (name,)])
        cert = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, days, [names])
        pair = Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        Path(pair.cert).write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        Path(pair.key).write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return pair

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, extensions: list[x509.ExtensionType]
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 60 * _DAY)
            .not_valid_after(now + days * _DAY)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
