"""Run by ``test_gevent`` in a process of its own: locks under gevent, in one of its worlds."""

from gevent import monkey

monkey.patch_all()

import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402

import gevent  # noqa: E402

import holdfast  # noqa: E402

TTL = 3.0


def hold_past_its_ttl(locks: holdfast.Locks, name: str) -> None:
    with locks.lock(name, ttl=TTL) as lease:
        time.sleep(2 * TTL)
        assert lease.held, lease.reason
    print("held", name, flush=True)


def greenlet(locks: holdfast.Locks) -> None:
    gevent.joinall(
        [gevent.spawn(hold_past_its_ttl, locks, f"greenlet {number}") for number in range(3)],
        raise_error=True,
    )


def thread(locks: holdfast.Locks) -> None:
    one = threading.Thread(target=hold_past_its_ttl, args=(locks, "thread"))
    one.start()
    one.join()


def hand_over(locks: holdfast.Locks) -> None:
    """Two clients, each with greenlets that wait for the same name."""
    tokens: list[int] = []

    def turns(client: holdfast.Locks) -> None:
        for _ in range(5):
            with client.lock("turns", timeout=30) as lease:
                tokens.append(lease.token)
                time.sleep(0.005)

    with holdfast.connect(sys.argv[2]) as other:
        gevent.joinall(
            [gevent.spawn(turns, client) for client in (locks, other) for _ in range(2)],
            raise_error=True,
        )
    assert len(tokens) == 20
    assert tokens == sorted(tokens)


def killed(locks: holdfast.Locks) -> None:
    """The lock of a greenlet that is killed is free."""
    holding = gevent.spawn(hold_past_its_ttl, locks, "killed")
    gevent.sleep(0.5)
    holding.kill()
    with locks.lock("killed", timeout=30):
        pass


def main(locks: holdfast.Locks) -> None:
    hold_past_its_ttl(locks, "main")


with holdfast.connect(sys.argv[2]) as client:
    globals()[sys.argv[1]](client)
print("done", flush=True)
