"""URLs of stores: the registry of schemes, and the parser.

A backend is a module with ``open_store(url, settings) -> Store``. The table below lists
ours; others register an entry point in the group ``holdfast.backends`` under their scheme.
"""

# Without "from __future__ import annotations": see holdfast.lazy.
import importlib
import os
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.contract import Settings, Store

__all__ = ["BACKENDS", "Url", "environment_url", "open_store", "parse_url"]

BACKENDS: dict[str, tuple[str, str]] = {
    # scheme: (module, the extra that installs what it needs)
    "memory": ("holdfast.stores.memory", ""),
    "local": ("holdfast.stores.sqlite", ""),
    "sqlite": ("holdfast.stores.sqlite", ""),
    "redis": ("holdfast.stores.redis", "redis"),
    "rediss": ("holdfast.stores.redis", "redis"),
    "unix": ("holdfast.stores.redis", "redis"),
    "redis+sentinel": ("holdfast.stores.redis", "redis"),
    "redis+cluster": ("holdfast.stores.redis", "redis"),
    "redlock": ("holdfast.stores.redlock", "redis"),
    "zookeeper": ("holdfast.stores.zookeeper", "zookeeper"),
    "etcd": ("holdfast.stores.etcd", "etcd"),
    "etcds": ("holdfast.stores.etcd", "etcd"),
    "consul": ("holdfast.stores.consul", "consul"),
    "consuls": ("holdfast.stores.consul", "consul"),
    "postgresql": ("holdfast.stores.postgres", "postgresql"),
    "mysql": ("holdfast.stores.mysql", "mysql"),
}

CLIENTS = {"redis": "redis", "valkey": "redis"}
"""Packages whose client objects ``connect`` accepts, and reads for their settings."""

OTHER_SCHEMES = {
    "postgres": "postgresql",
    "pg": "postgresql",
    "psql": "postgresql",
    "mariadb": "mysql",
    "valkey": "redis",
    "valkeys": "rediss",
    "sentinel": "redis+sentinel",
    "zk": "zookeeper",
    "etcd3": "etcd",
    "file": "sqlite",
}
"""What other libraries call the stores that we have."""

LONGEST_SECRET = 65536
LONGEST_SHOWN_PORT = 6
"""A number with more digits may be a password in the wrong place."""
_ESCAPE = "a '/', '?' or '@' in a user name or password is written %2F, %3F or %40"
_USER_ALONE = ("postgresql", "mysql")
"""Schemes where a user without a password is usual: the password may be configured elsewhere."""
_FILES = ("sqlite", "unix")
_SECRETS = ("pass", "secret", "token", "key", "auth", "credential")


class Url(NamedTuple):
    """A parsed URL of a store. ``str()`` and ``repr()`` never show its secrets."""

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
        user = f"{self._shown_user()}@" if self.username else ""
        shown = "&".join(
            f"{key}={'***' if _is_secret(key) or '://' in value else value}"
            for key, value in self.options.items()
        )
        return f"{self.scheme}://{user}{hosts}{self.path}{'?' if shown else ''}{shown}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def _shown_user(self) -> str | None:
        """The user name, or ``***`` if it may be a secret: a user name without a password is often
        a password or token in the wrong place."""
        return self.username if self.password or self.scheme in _USER_ALONE else "***"

    def scrub(self, text: str) -> str:
        """A text, such as a driver's error, with the secrets of this URL replaced."""
        from urllib.parse import quote

        secrets = [value for key, value in self.options.items() if _is_secret(key)]
        for secret in filter(None, (self.password, *secrets)):
            for form in (secret, quote(secret), quote(secret, safe="")):
                text = text.replace(form, "***")
        return text

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
    """Parses a store's URL; raises ``ValueError`` without repeating what may be a secret."""
    if text == "local":
        return Url("local", None, None, (), "", {})
    _check_text(text)
    scheme, found, rest = text.strip().partition("://")
    if not found or not _is_scheme(scheme):
        raise ValueError(
            "not a store's URL: expected scheme://… such as redis://host:6379/0, or local"
        )
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    _refuse_misplaced_at(scheme.lower(), authority, path, query)
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


def _refuse_misplaced_at(scheme: str, authority: str, path: str, query: str) -> None:
    """Raises ``ValueError`` for an '@' behind the host: it ends a password that has an
    unescaped '/' or '?'."""
    in_path = "@" in path and (authority or scheme not in _FILES)
    if in_path or any("@" in part and "://" not in part for part in query.split("&")):
        raise ValueError(f"not a store's URL: there is an '@' behind the host; {_ESCAPE}")


def environment_url() -> str | None:
    """The URL in ``HOLDFAST_URL``, or in the file that ``HOLDFAST_URL_FILE`` names."""
    url, path = os.environ.get("HOLDFAST_URL"), os.environ.get("HOLDFAST_URL_FILE")
    if url and path:
        raise ValueError("HOLDFAST_URL and HOLDFAST_URL_FILE are both set: set only one of them")
    return read_secret(path, "HOLDFAST_URL_FILE") if path else url or None


def read_secret(path: str, variable: str) -> str:
    """The text in a file that an environment variable names; raises ``ValueError``.

    An empty file is an error: a secret that is not written yet must not count as no secret.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:  # noqa: PTH123 - pathlib is slow to import
            text = file.read(LONGEST_SECRET).strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ValueError(f"{variable}: {path!r} can't be read: {why}") from None
    if not text:
        raise ValueError(f"{variable}: {path!r} is empty")
    return text


def _is_secret(key: str) -> bool:
    return any(word in key.lower() for word in _SECRETS)


def _is_scheme(text: str) -> bool:
    letters = text.translate({ord(mark): "0" for mark in "+.-"})
    return text.isascii() and text[:1].isalpha() and letters.isalnum()


def _decode(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote

    return _check_text(unquote(text, errors="surrogateescape"))


def _options(query: str) -> dict[str, str]:
    if not query:
        return {}
    from urllib.parse import parse_qsl

    pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    return {_check_text(key): _check_text(value) for key, value in pairs}


def _check_text(text: str) -> str:
    """Raises ``ValueError`` for bytes that are not UTF-8, which environment variables and percent
    encoding can contain: drivers would fail with an error that shows the whole password."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("not a store's URL: its bytes, also as %XX, must be UTF-8")
    return text


def _host(text: str) -> tuple[str, int | None]:
    import re

    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+))?", text)
    if match is None:
        raise ValueError(f"not a host or host:port; {_ESCAPE}")
    if match[2] and not 0 < int(match[2]) < 65536:
        number = match[2] if len(match[2]) <= LONGEST_SHOWN_PORT else "the number behind the host"
        raise ValueError(f"{number} is not a port (1 to 65535)")
    return _decode(match[1].strip("[]")), int(match[2]) if match[2] else None


def open_store(source: str | object, settings: Settings) -> Store:
    """Makes the store of a URL, or of a user's own client object. Contacts nothing yet."""
    if isinstance(source, str):
        url = parse_url(source)
    else:
        url = Url(_client_scheme(source), None, None, (), "", {})
        settings = settings._replace(client=source)
    if url.scheme in BACKENDS:
        module, extra = BACKENDS[url.scheme]
        try:
            opener: Callable[[Url, Settings], Store] = importlib.import_module(module).open_store
            return opener(url, settings)  # it imports the store's client library
        except ModuleNotFoundError as error:
            says_how = "pip install" in str(error)
            if not extra or says_how or (error.name or "").startswith("holdfast"):
                raise
            raise ModuleNotFoundError(
                f"{url.scheme}:// needs {error.name!r}: pip install 'holdfast[{extra}]'",
                name=error.name,
            ) from None
    return _third_party(url, settings)


def _client_scheme(client: object) -> str:
    """The scheme of a user's client object, by its package; raises ``TypeError``."""
    package = type(client).__module__.partition(".")[0]
    if package in CLIENTS:
        return CLIENTS[package]
    raise TypeError(f"connect() takes a URL or a client of redis-py, not {type(client).__name__}")


def _third_party(url: Url, settings: Settings) -> Store:
    from importlib.metadata import entry_points

    for entry in entry_points(group="holdfast.backends", name=url.scheme):
        store: Store = entry.load()(url, settings)
        return store
    meant = _meant_scheme(url.scheme)
    hint = f": did you mean {meant}://?" if meant else ""
    known = ", ".join(BACKENDS)
    raise ValueError(f"no store is known for {url.scheme}://{hint} (known are {known})")


def _meant_scheme(scheme: str) -> str:
    """The scheme that another library's URL or a misspelt one stands for; "" if there is none."""
    from difflib import get_close_matches

    first = scheme.partition("+")[0]  # SQLAlchemy names the driver behind it
    first = OTHER_SCHEMES.get(first, first)
    return first if first in BACKENDS else "".join(get_close_matches(scheme, BACKENDS, 1))
