"""Reads a ``zookeeper://`` URL: hosts, path, credentials, TLS."""

from __future__ import annotations

import importlib.util
import os
import ssl

from holdfast.core.contract import Settings
from holdfast.stores.zookeeper.client.greeting import Access, DigestAccess, SaslAccess
from holdfast.stores.zookeeper.session import ZooKeeperOptions
from holdfast.url import Url

__all__ = ["read_options"]

PORT, TLS_PORT = 2181, 2281
LONGEST_TICK_SECONDS = 60.0
USERNAME, PASSWORD = "HOLDFAST_ZOOKEEPER_USERNAME", "HOLDFAST_ZOOKEEPER_PASSWORD"
_KNOWN = (
    "auth",
    "ca",
    "cert",
    "check_hostname",
    "key",
    "mechanism",
    "service",
    "tick",
    "tls",
    "verify",
)


def read_options(url: Url, settings: Settings) -> ZooKeeperOptions:
    """The options of a URL. Raises ``ValueError`` for values that make no sense."""
    url.refuse_unknown(*_KNOWN)
    if not url.hosts:
        raise ValueError("zookeeper:// names no server: zookeeper://host1,host2,host3/path")
    if "//" in url.path or any(part in (".", "..") for part in url.path.split("/")):
        raise ValueError(f"not a ZooKeeper path: {url.path!r}")
    tls = _tls(url)
    usual = PORT if tls is None else TLS_PORT
    hosts = tuple((name, port or usual) for name, port in url.hosts)
    seconds = settings.request_seconds
    return ZooKeeperOptions(hosts, str(url), seconds, _access(url), tls, _tick(url))


def _tick(url: Url) -> float | None:
    """The servers' ``tickTime`` in seconds. (Their configuration has it in milliseconds.)"""
    tick = url.number("tick", 0.0)
    if tick > LONGEST_TICK_SECONDS:
        raise ValueError(f"tick={tick:g}: the servers' tickTime in seconds, such as 2 or 0.5")
    return tick or None


def _tls(url: Url) -> ssl.SSLContext | None:
    """The TLS settings, or ``None`` without TLS. Reads the files now, so that errors show now."""
    files = {key: url.options[key] for key in ("ca", "cert", "key") if key in url.options}
    if not url.flag("tls", default=bool(files)):
        if files:
            raise ValueError("ca, cert and key are for tls=on")
        return None
    verify = url.flag("verify", default=True)
    check = url.flag("check_hostname", default=verify)
    if check and not verify:
        raise ValueError("check_hostname=on needs verify=on")
    try:
        context = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files.get("key"))
    except OSError as error:
        paths = ", ".join(files.values())
        raise ValueError(f"the files for TLS can't be used ({paths}): {error}") from error
    context.check_hostname = check
    context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
    return context


def _access(url: Url) -> Access:
    """Who we are to the servers, and the access list of our nodes."""
    username = url.username or os.environ.get(USERNAME)
    password = url.password if url.password is not None else os.environ.get(PASSWORD, "")
    how = url.options.get("auth", "digest" if username else "none")
    if how not in ("none", "sasl", "digest"):
        raise ValueError(f"auth={how!r}: digest, sasl or none")
    mechanism = url.options.get("mechanism", "DIGEST-MD5")
    if mechanism != "DIGEST-MD5":
        raise ValueError(
            f"mechanism={mechanism!r}: SASL is spoken with DIGEST-MD5 only. For Kerberos (GSSAPI) "
            "there is no support: use DIGEST-MD5, auth=digest, or client certificates (tls=on)"
        )
    if how == "none":
        return Access()
    if not username:
        raise ValueError(f"auth={how} needs user:password@ in the URL, or {USERNAME}")
    if how == "digest":
        return DigestAccess(username, password)
    if importlib.util.find_spec("puresasl") is None:
        raise ModuleNotFoundError(
            "auth=sasl needs the package 'pure-sasl': pip install 'holdfast[zookeeper]'",
            name="puresasl",
        )
    return SaslAccess(username, password, url.options.get("service", "zookeeper"))
