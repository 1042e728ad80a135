"""Reads a ``zookeeper://`` URL: hosts, path, credentials, TLS."""

from __future__ import annotations

import importlib.util
import os
import ssl
from typing import Any

from kazoo.security import ACL, OPEN_ACL_UNSAFE, make_acl, make_digest_acl

from holdfast.core.contract import Settings
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
    hosts = ",".join(_host(name, port, tls is not None) for name, port in url.hosts)
    client, acl = _access(url)
    return ZooKeeperOptions(hosts, str(url), settings.request_seconds, acl, client, tls, _tick(url))


def _tick(url: Url) -> float | None:
    """The servers' ``tickTime`` in seconds. (Their configuration has it in milliseconds.)"""
    tick = url.number("tick", 0.0)
    if tick > LONGEST_TICK_SECONDS:
        raise ValueError(f"tick={tick:g}: the servers' tickTime in seconds, such as 2 or 0.5")
    return tick or None


def _host(name: str, port: int | None, tls: bool) -> str:
    shown = f"[{name}]" if ":" in name else name
    return f"{shown}:{port or (TLS_PORT if tls else PORT)}"


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
        raise ValueError(f"the files for TLS can't be read: {error}") from error
    context.check_hostname = check
    context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
    return context


def _access(url: Url) -> tuple[dict[str, Any], tuple[ACL, ...]]:
    """The credentials for kazoo, and the access list of our nodes."""
    username = url.username or os.environ.get(USERNAME)
    password = url.password if url.password is not None else os.environ.get(PASSWORD, "")
    how = url.options.get("auth", "digest" if username else "none")
    if how == "none":
        return {}, tuple(OPEN_ACL_UNSAFE)
    if how == "sasl":
        return _sasl(url, username, password)
    if how != "digest":
        raise ValueError(f"auth={how!r}: digest, sasl or none")
    if not username:
        raise ValueError(f"auth=digest needs user:password@ in the URL, or {USERNAME}")
    acl = make_digest_acl(username, password, all=True)
    return {"auth_data": {("digest", f"{username}:{password}")}}, (acl,)


def _sasl(url: Url, username: str | None, password: str) -> tuple[dict[str, Any], tuple[ACL, ...]]:
    if importlib.util.find_spec("puresasl") is None:
        raise ModuleNotFoundError(
            "auth=sasl needs the package 'pure-sasl': pip install pure-sasl", name="puresasl"
        )
    options = {"mechanism": url.options.get("mechanism", "DIGEST-MD5")}
    if "service" in url.options:
        options["service"] = url.options["service"]
    if username:
        options |= {"username": username, "password": password}
        acl = make_acl("sasl", username, all=True)
    else:  # a Kerberos ticket: the server derives the user
        acl = make_acl("auth", "", all=True)
    return {"sasl_options": options}, (acl,)
