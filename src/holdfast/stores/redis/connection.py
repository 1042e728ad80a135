"""Opens connections to a Redis server: socket, TLS, login, first command; and subscriptions.

Only what is needed is sent: AUTH if there is a login, SELECT if the database is not 0, and CLIENT
SETNAME, which a server may refuse. They are sent at once, with the first command, in one round
trip. There is no HELLO: RESP 2 is what every server speaks first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.io import blocking
from holdfast.io.blocking import new_pool
from holdfast.io.clock import now
from holdfast.io.connection import Broken, World, exchange, open_socket, open_unix
from holdfast.io.resp import RedisRefused, RespConnection, pack
from holdfast.io.wakeups import Messages
from holdfast.stores.redis.replies import (
    RedisConnectionBroken,
    login_refused,
    read_wakeup,
    unreachable,
)
from holdfast.stores.redis.url import Access, Greeting, NodeAddress

__all__ = ["Connector", "RedisEndpoint"]

_TOO_MANY_WORDS = "wrong number of arguments"
"""What a server before Redis 6 says to AUTH with a user's name."""


class _LoginRefused(RedisConnectionBroken):
    """The server refuses AUTH."""


class RedisEndpoint:
    """One node, as the pools of the drivers need it."""

    def __init__(
        self, access: Access, address: NodeAddress, greeting: Greeting | None = None
    ) -> None:
        self.access, self.address, self._greeting = access, address, greeting
        self.request_seconds = access.request_seconds

    def failure(self, error: OSError, seconds: float) -> RedisConnectionBroken:
        return unreachable(self.address, error, seconds)

    async def open(self, world: World, until: float) -> RespConnection:
        """A connection that is logged in. Raises ``RedisConnectionBroken``, or what the greeting
        raises, at ``until`` at the latest."""
        seconds = max(0.0, until - now())
        try:
            return await self._open(world, until)
        except HoldfastError:
            raise
        except OSError as error:
            raise unreachable(self.address, error, seconds) from error

    async def _open(self, world: World, until: float) -> RespConnection:
        access = self.access
        name = access.client_name
        try:
            return await self._log_in(world, name, until)
        except _LoginRefused:
            # The credentials may have expired: the provider is asked once more.
            if "credential_provider" not in access.options:
                raise
            return await self._log_in(world, name, until)
        except Broken as error:
            # Perhaps a proxy that closes the connection because it does not know the command.
            if not name or not error.closed:
                raise
        connection = await self._log_in(world, "", until)
        access.client_name = ""  # later connections need not find that out again
        return connection

    async def _log_in(self, world: World, name: str, until: float) -> RespConnection:
        connection = RespConnection(await self._connect(world, until))
        try:
            await self._greet(world, connection, name, until)
        except BaseException:
            connection.close()
            raise
        connection.greeted()
        return connection

    async def _connect(self, world: World, until: float) -> Any:
        host, port = self.address
        if not port:
            return await open_unix(world, host, until)
        tls = self.access.context() if self.access.tls else None
        return await open_socket(world, host, port, until, tls)

    async def _greet(
        self, world: World, connection: RespConnection, name: str, until: float
    ) -> None:
        login = await self._credentials(world, until)
        commands = [pack("AUTH", *login)] if login else []
        if name:
            commands.append(pack("CLIENT", "SETNAME", name))
        database = self.access.options.get("db") or 0
        if database:
            commands.append(pack("SELECT", database))
        if self._greeting is not None:
            commands.append(self._greeting.packed)
        replies: list[Any] = []
        try:
            await exchange(world, connection, commands, until, replies)
        except Broken:
            # It may say why before it closes, unless that is about the name only.
            if replies and type(replies[0]) is RedisRefused and (login or not name):
                kind = _LoginRefused if login else RedisConnectionBroken
                raise login_refused(self.address, replies[0], kind) from None
            raise
        if len(login) == 2 and _TOO_MANY_WORDS in str(replies[0]):
            commands[0] = pack("AUTH", login[1])
            replies = await exchange(world, connection, commands, until)
        self._judge(replies, login=bool(login), name=bool(name), database=bool(database))

    async def _credentials(self, world: World, until: float) -> tuple[str, ...]:
        """The password, or user name and password; nothing without a login."""
        options = self.access.options
        provider = options.get("credential_provider")
        words = (options.get("username"), options.get("password"))
        if provider is not None:
            try:
                return tuple(map(_text, await _ask(provider, world, until)))
            except Exception as error:
                # By its type only: its text is not ours, and may have a secret in it.
                raise RedisConnectionBroken(
                    f"redis at {self.address} can't be used: its credential provider failed with "
                    f"{type(error).__name__}",
                    closed=False,
                ) from error
        if not any(words):
            return ()
        return tuple(_text(word or "") for word in (words if words[0] else words[1:]))

    def _judge(self, replies: Sequence[Any], *, login: bool, name: bool, database: bool) -> None:
        left = list(replies)
        if left and type(left[0]) is RedisRefused and "max number of clients" in str(left[0]):
            raise login_refused(self.address, left[0])
        if login and type(reply := left.pop(0)) is RedisRefused:
            raise login_refused(self.address, reply, _LoginRefused)
        if name:
            left.pop(0)  # the user may lack the right, or the server the command
        if database and type(reply := left.pop(0)) is RedisRefused:
            raise login_refused(self.address, reply)
        if self._greeting is not None:
            self._greeting.judge(left[0])


async def _ask(provider: Any, world: World, until: float) -> Any:
    asynchronous = getattr(provider, "get_credentials_async", None)
    if world.blocking or asynchronous is None:
        return provider.get_credentials()
    import asyncio

    async with asyncio.timeout(max(0.0, until - now())):
        return await asynchronous()


def _text(word: str | bytes) -> str:
    return word.decode() if isinstance(word, bytes) else word


class Connector:
    """Opens connections, pools and subscriptions, for threads or for an event loop."""

    def __init__(self, access: Access, connections: int, *, blocking: bool) -> None:
        self.access, self.connections, self.blocking = access, connections, blocking
        self.world: World = _world(blocking)

    def pool(self, address: NodeAddress, greeting: Greeting | None) -> Any:
        endpoint = RedisEndpoint(self.access, address, greeting)
        return new_pool(endpoint, self.connections, blocking=self.blocking)

    async def once(
        self, access: Access, address: NodeAddress, *commands: bytes, until: float | None = None
    ) -> list[Any]:
        """Opens a connection, sends commands, closes it. Returns their replies."""
        connection, replies = await self.begin(access, address, commands, until)
        connection.close()
        return replies

    async def subscription(
        self, address: NodeAddress, channel: str, until: float | None = None
    ) -> Messages:
        """A subscription to a channel. Raises ``RedisConnectionBroken``."""
        commands = [pack("SUBSCRIBE", channel)]
        connection, replies = await self.begin(self.access, address, commands, until)
        if type(replies[0]) is RedisRefused:
            connection.close()
            message = f"redis at {address} refuses SUBSCRIBE: {replies[0]}"
            raise RedisConnectionBroken(message, closed=False)
        return Messages(connection, read_wakeup)

    async def begin(
        self,
        access: Access,
        address: NodeAddress,
        commands: Sequence[bytes],
        until: float | None,
    ) -> tuple[RespConnection, list[Any]]:
        """Opens a connection and sends its first commands. Raises ``RedisConnectionBroken``."""
        endpoint = RedisEndpoint(access, address)
        seconds = access.seconds_until(until)
        by = now() + seconds
        connection = await endpoint.open(self.world, by)
        try:
            return connection, await exchange(self.world, connection, commands, by)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise endpoint.failure(error, seconds) from error
            raise

    async def sleep(self, seconds: float) -> None:
        await self.world.ready({}, now() + seconds)


def _world(threads: bool) -> World:
    if threads:
        return blocking.WORLD
    from holdfast.io.aio import WORLD

    return WORLD
