"""Resources by their address, for the command line: where a resource is, and what it is called.

``postgresql://…#orders``, ``mysql://…#orders``, ``sqlite:///shop.db#orders``,
``redis://…#stock:7``, ``file:/srv/ledger.json`` (or just a path), ``gate:printer``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from holdfast.claim import Fence
from holdfast.errors import BackendUnavailable, HoldfastError, Unsupported
from holdfast.fencing import file, gate, redis, sql
from holdfast.url import Url, parse_url

__all__ = ["enter_at"]

LOGIN_SECONDS = 30.0


def enter_at(address: str, fence: Fence, *, table: str, open_client: Callable[[], Any]) -> None:
    """Lets a fence enter the resource at an address; raises ``StaleFence``.

    ``open_client`` opens the store that a gate is on. Raises ``ValueError`` for what is no address.
    """
    scheme, colon, rest = address.partition(":")
    if scheme == "file" or not colon or address.startswith((".", "/")):
        _enter_file(rest.removeprefix("//") if scheme == "file" else address, fence)
    elif scheme == "gate":
        with open_client() as locks, gate.Gate(locks).enter(unquote(rest), fence):
            pass
    else:
        where, mark, resource = address.partition("#")
        if not mark or not resource:
            raise ValueError("the resource's name is missing: end the address with #name")
        if "@" in resource and not {"@", "/"} & set(where.partition("://")[2]):
            # Taken as it stands, the first half of a password would be shown as a host.
            raise ValueError("write a '#' in a password as %23, and an '@' in a name as %40")
        _enter_store(where, unquote(resource), fence, table)


def _enter_file(path: str, fence: Fence) -> None:
    if not Path(path).parent.is_dir():
        raise ValueError(f"there is no folder {str(Path(path).parent)!r}")
    try:
        with file.guard(path, fence):
            pass
    except OSError as error:
        raise BackendUnavailable(f"{path!r} can't be guarded: {error.strerror}") from error


def _enter_store(where: str, resource: str, fence: Fence, table: str) -> None:
    url = parse_url(where)
    if url.scheme not in _OPENERS:
        known = ", ".join((*_OPENERS, "file", "gate"))
        raise ValueError(f"no resource is known at {url.scheme}:; known are {known}")
    extra, opener = _OPENERS[url.scheme]
    try:
        with closing(opener(url, _for_drivers(url, where))) as opened:
            if extra == "redis":
                redis.guard(opened, resource, fence).enter()
            else:
                _enter_table(opened, resource, fence, table)
    except ModuleNotFoundError as error:
        words = f"{url.scheme}: needs {error.name!r}: pip install 'holdfast[{extra}]'"
        raise Unsupported(words) from None
    except HoldfastError:
        raise
    except ValueError as error:
        raise ValueError(url.scrub(str(error))) from None
    except Exception as error:  # noqa: BLE001 - each driver has words of its own for it
        # Without its cause, too: drivers repeat what they can't read, be it the password.
        message = url.scrub(f"{type(error).__name__}: {error}")
        raise BackendUnavailable(f"{url}: {message}") from None


def _for_drivers(url: Url, where: str) -> str:
    """The URL with user and password escaped in full: drivers read what is not in other ways than
    we do, and repeat what they can't read."""
    rest = where.partition("://")[2]
    authority = rest.partition("?")[0].partition("/")[0]
    userinfo, at, hosts = authority.rpartition("@")
    if at:
        words = [quote(url.username or "", safe="")]
        words += [] if url.password is None else [quote(url.password, safe="")]
        userinfo = ":".join(words)
    return f"{url.scheme}://{userinfo}{at}{hosts}{rest[len(authority) :]}"


def _enter_table(connection: Any, resource: str, fence: Fence, table: str) -> None:
    try:
        sql.guard(connection, resource, fence, table=table)
    except Unsupported:  # the step that makes the table, where it must come first
        connection.rollback()
        sql.create(connection, table=table)
        sql.guard(connection, resource, fence, table=table)
    connection.commit()


def _redis(_: Url, where: str) -> Any:
    from redis import Redis

    return Redis.from_url(where)


def _postgresql(url: Url, where: str) -> Any:
    import psycopg

    given: dict[str, Any] = {}
    if "connect_timeout" not in url.options:
        given["connect_timeout"] = int(LOGIN_SECONDS)
    return psycopg.connect(where, **given)


def _mysql(url: Url, _: str) -> Any:
    """As a store is connected to: with the same options, and none of them passed over."""
    from holdfast.io.clock import now
    from holdfast.stores.mysql.connect import OPTIONS, address_of, log_in

    url.refuse_unknown(*OPTIONS)
    return log_in(address_of(url), now() + LOGIN_SECONDS)


def _sqlite(url: Url, _: str) -> Any:
    import sqlite3

    path = Path(url.path)
    if not path.is_file():
        raise ValueError(f"there is no database {str(path)!r}")
    return sqlite3.connect(path, timeout=30)


_OPENERS: dict[str, tuple[str, Callable[[Url, str], Any]]] = {
    # scheme: (the extra that installs what it needs, how it is opened)
    "postgresql": ("postgresql", _postgresql),
    "mysql": ("mysql", _mysql),
    "sqlite": ("", _sqlite),
    "redis": ("redis", _redis),
    "rediss": ("redis", _redis),
    "unix": ("redis", _redis),
}
