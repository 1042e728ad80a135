"""Scheme → backend, the one registry, and the reading of URLs.

A backend is a module with ``open_store(url, settings) -> Store``. Ours are in the table below;
others register an entry point in the group ``holdfast.backends`` under their scheme.
"""

# Without "from __future__ import annotations": see holdfast.claim.
import importlib
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.contract import Settings, Store

__all__ = ["BACKENDS", "Url", "open_store", "parse_url"]

BACKENDS: dict[str, tuple[str, str]] = {
    # scheme: (module, the extra that installs what it needs)
    "memory": ("holdfast.backends.memory", ""),
    "local": ("holdfast.backends.sqlite", ""),
    "sqlite": ("holdfast.backends.sqlite", ""),
    "redis": ("holdfast.backends.redis", "redis"),
    "rediss": ("holdfast.backends.redis", "redis"),
    "unix": ("holdfast.backends.redis", "redis"),
    "redis+sentinel": ("holdfast.backends.redis", "redis"),
    "redis+cluster": ("holdfast.backends.redis", "redis"),
    "redlock": ("holdfast.backends.redlock", "redis"),
    "zookeeper": ("holdfast.backends.zookeeper", "zookeeper"),
    "etcd": ("holdfast.backends.etcd", "etcd"),
    "etcds": ("holdfast.backends.etcd", "etcd"),
    "consul": ("holdfast.backends.consul", "consul"),
    "consuls": ("holdfast.backends.consul", "consul"),
    "postgresql": ("holdfast.backends.postgres", "postgresql"),
    "mysql": ("holdfast.backends.mysql", "mysql"),
}

CLIENTS = {"redis": "redis", "valkey": "redis"}
"""Packages whose client objects are accepted for their settings."""

_SECRETS = ("pass", "secret", "token", "key", "auth", "credential")


class Url(NamedTuple):
    """A store's URL, taken apart. ``str()`` and ``repr()`` never show its secrets."""

    scheme: str
    username: str | None
    password: str | None
    hosts: tuple[tuple[str, int | None], ...]
    path: str
    options: dict[str, str]

    def __str__(self) -> str:
        hosts = ",".join(
            (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
            for host, port in self.hosts
        )
        user = f"{self.username}@" if self.username else ""
        shown = "&".join(
            f"{key}={'***' if _is_secret(key) or '://' in value else value}"
            for key, value in self.options.items()
        )
        return f"{self.scheme}://{user}{hosts}{self.path}{'?' if shown else ''}{shown}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def refuse_unknown(self, *known: str) -> None:
        """Raises ``ValueError`` for an option that the store does not have."""
        for key in self.options:
            if key not in known:
                choices = f"; it has {', '.join(sorted(known))}" if known else "; it has none"
                raise ValueError(f"{self.scheme}:// has no option {key!r}{choices}")

    def flag(self, key: str, default: bool = False) -> bool:
        """An option that is on or off."""
        text = self.options.get(key)
        if text is None:
            return default
        if text.lower() in ("on", "true", "yes", "1"):
            return True
        if text.lower() in ("off", "false", "no", "0"):
            return False
        raise ValueError(f"{key}={text!r}: an option that is on or off")

    def number(self, key: str, default: float) -> float:
        """An option that is a positive number."""
        text = self.options.get(key)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ValueError(f"{key}={text!r}: an option that is a number, 0 or more")
        return value


def parse_url(text: str) -> Url:
    """Takes a store's URL apart; raises ``ValueError`` without repeating what may be a secret."""
    if text == "local":
        return Url("local", None, None, (), "", {})
    scheme, found, rest = text.strip().partition("://")
    if not found or not _is_scheme(scheme):
        raise ValueError(
            "not a store's URL: expected scheme://… such as redis://host:6379/0, or local"
        )
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    username, colon, password = userinfo.partition(":")
    return Url(
        scheme.lower(),
        _decode(username) if at and username else None,
        _decode(password) if colon else None,
        tuple(_host(part) for part in hosts.split(",") if part),
        _decode(slash + path),
        _options(query),
    )


def _is_secret(key: str) -> bool:
    return any(word in key.lower() for word in _SECRETS)


def _is_scheme(text: str) -> bool:
    letters = text.translate({ord(mark): "0" for mark in "+.-"})
    return text.isascii() and text[:1].isalpha() and letters.isalnum()


def _decode(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote

    return unquote(text)


def _options(query: str) -> dict[str, str]:
    if not query:
        return {}
    from urllib.parse import parse_qsl

    return dict(parse_qsl(query, keep_blank_values=True))


def _host(text: str) -> tuple[str, int | None]:
    import re

    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+))?", text)
    if match is None or (match[2] and not 0 < int(match[2]) < 65536):
        raise ValueError("not a host or host:port; a '/', '?' or '@' in a password is written %2F")
    return _decode(match[1].strip("[]")), int(match[2]) if match[2] else None


def open_store(source: str | object, settings: Settings) -> Store:
    """Makes the store of a URL, or of a user's own client. Nothing touches the network yet."""
    if isinstance(source, str):
        url = parse_url(source)
    else:
        url = Url(_client_scheme(source), None, None, (), "", {})
        settings = settings._replace(client=source)
    if url.scheme in BACKENDS:
        module, extra = BACKENDS[url.scheme]
        try:
            opener: Callable[[Url, Settings], Store] = importlib.import_module(module).open_store
        except ModuleNotFoundError as error:
            if not extra or (error.name or "").startswith("holdfast"):
                raise
            raise ModuleNotFoundError(
                f"{url.scheme}:// needs {error.name!r}: pip install 'holdfast[{extra}]'",
                name=error.name,
            ) from None
        return opener(url, settings)
    return _third_party(url, settings)


def _client_scheme(client: object) -> str:
    """The store whose client this is, by the package it comes from."""
    package = type(client).__module__.partition(".")[0]
    if package in CLIENTS:
        return CLIENTS[package]
    raise TypeError(f"connect() takes a URL or a client of redis-py, not {type(client).__name__}")


def _third_party(url: Url, settings: Settings) -> Store:
    from importlib.metadata import entry_points

    for entry in entry_points(group="holdfast.backends", name=url.scheme):
        store: Store = entry.load()(url, settings)
        return store
    raise ValueError(f"no store is known for {url.scheme}://; known are {', '.join(BACKENDS)}")
