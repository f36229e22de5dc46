"""How the scheduler gets in at the daemon: settings of `taskdb.*`, and where they say nothing, the certificates Dask itself has."""

from __future__ import annotations

from distributed.security import Security

from scheduler_adapter.config import AdapterConfig
from taskdb.access import Access, Daemon, parse_address


def daemon_at(url: str, config: AdapterConfig, security: Security) -> Daemon:
    """`security`: the scheduler's. Raises InvalidRequest if the address is none."""
    address = parse_address(url)
    if address.scheme == "tcp" and config.tls_ca_file is not None:
        url, tls = f"tls://{address.target}", True
    else:
        tls = address.scheme == "tls"
    if not tls:
        return Daemon(url, Access(token_file=config.token_file))
    cert, key = config.tls_cert, config.tls_key
    if cert is None:
        cert, key = security.tls_scheduler_cert, security.tls_scheduler_key
    return Daemon(url, Access(config.tls_ca_file or security.tls_ca_file, cert, key, config.tls_name, config.token_file))
