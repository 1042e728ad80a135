"""A flash sale that must not oversell: the picture of why locks need fences.

A seller takes the lock, reads the stock, and is paused (SIGSTOP) before it writes. Its lease runs
out, others sell everything, it wakes up and goes on. Without fencing it writes an old stock over
the new one, and what is sold out is sold again. With fencing its write is refused.

    python examples/flash_sale.py            # one sale without fencing, one with
    python examples/flash_sale.py --runs 100 # a hundred fenced sales: never oversold
"""

from __future__ import annotations

import os
import signal
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from scene import Pipe, Scene, arguments, processes

from holdfast import (
    BackendUnavailable,
    Lease,
    LockLost,
    Locks,
    LockTimeout,
    StaleFence,
    fencing,
)

ITEMS = 3
TRIES = 60


class Shop:
    """The resource: a database of the shop's own, which knows nothing of leases."""

    def __init__(self, path: str, fenced: bool) -> None:
        self.fenced = fenced
        self.database = sqlite3.connect(path, timeout=30)
        with self.database:
            self.database.execute("CREATE TABLE IF NOT EXISTS stock (left_over INTEGER)")
            self.database.execute("CREATE TABLE IF NOT EXISTS orders (token INTEGER)")

    def open(self, items: int) -> None:
        with self.database:
            self.database.execute("INSERT INTO stock VALUES (?)", (items,))

    def enter(self, lease: Lease) -> None:
        """The one line that makes the difference."""
        if self.fenced:
            fencing.sql.guard(self.database, lease.name, lease)

    def look(self, lease: Lease) -> int:
        with self.database:
            self.enter(lease)
            (left,) = self.database.execute("SELECT left_over FROM stock").fetchone()
        return int(left)

    def sell(self, lease: Lease, left: int) -> None:
        with self.database:
            self.enter(lease)
            self.database.execute("UPDATE stock SET left_over = ?", (left - 1,))
            self.database.execute("INSERT INTO orders VALUES (?)", (lease.token,))

    def sold(self) -> int:
        (count,) = self.database.execute("SELECT COUNT(*) FROM orders").fetchone()
        return int(count)


def sell_one(locks: Locks, shop: Shop, pause: Any = None) -> bool:
    """Sells one item; whether there was one. ``pause`` is where the unlucky seller is stopped."""
    try:
        with locks.lock("sale", timeout=60) as lease:
            left = shop.look(lease)
            if left == 0:
                return False
            if pause is not None:
                pause()
            shop.sell(lease, left)
    except LockLost:
        pass  # it was paused for too long; unfenced, the damage is done
    except StaleFence as error:
        print(f"    refused: {error}")
    return True


def unlucky_seller(_: int, scene: Scene, pipe: Any) -> None:
    """Sells one item in each sale, and is stopped in the middle of it."""

    def pause() -> None:
        pipe.send("I have read the stock")
        pipe.recv()  # it is stopped here, and continued when everything is sold

    with scene.connect() as locks:
        while (sale := pipe.recv()) is not None:
            shop = Shop(*sale)
            sell_one(locks, shop, pause)
            shop.database.close()
            pipe.send("done")


def stop(locks: Locks, seller: int) -> None:
    """Stops the seller at any moment but one: in the middle of a transaction of the embedded
    store it would keep everybody else from that file, and there would be no story."""
    for _ in range(TRIES):
        os.kill(seller, signal.SIGSTOP)
        # Its threads stop one by one, and not before the first of them has had its turn.
        os.waitid(os.P_PID, seller, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            with locks.lock("is the store free?", timeout=1):
                return
        except (LockTimeout, LockLost, BackendUnavailable):
            os.kill(seller, signal.SIGCONT)
    raise SystemExit("the store is not to be had")


def sale(locks: Locks, pipe: Any, seller: int, fenced: bool) -> int:
    """One sale; how many items were sold."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "shop.db")
        shop = Shop(path, fenced)
        shop.open(ITEMS)
        pipe.send((path, fenced))
        pipe.recv()
        stop(locks, seller)
        try:
            pipe.send("go on")  # it reads this when it wakes up
            while sell_one(locks, shop):
                pass
        finally:
            os.kill(seller, signal.SIGCONT)
        pipe.recv()
        while sell_one(locks, shop):  # is there anything left to sell?
            pass
        count = shop.sold()
        shop.database.close()
        return count


def main() -> None:
    parser = arguments("A flash sale with a seller that is paused in the middle.", ttl=1.0)
    parser.add_argument("--runs", type=int, default=1, help="how many fenced sales")
    parser.add_argument("--unfenced", type=int, default=1, help="how many sales without fencing")
    options = parser.parse_args()
    scene = Scene(options.url, options.ttl)
    ours, theirs = Pipe()
    (seller,) = processes(1, unlucky_seller, scene, theirs)
    theirs.close()  # if the seller dies, we hear of it
    assert seller.pid is not None
    oversold = {False: 0, True: 0}
    with scene.connect() as locks, ours:  # the seller ends with its pipe
        for fenced, runs in ((False, options.unfenced), (True, options.runs)):
            for _ in range(runs):
                print("with fencing:" if fenced else "without fencing:")
                sold = sale(locks, ours, seller.pid, fenced)
                print(f"    {sold} sold of {ITEMS}{': OVERSOLD' if sold > ITEMS else ''}")
                oversold[fenced] += sold > ITEMS
        ours.send(None)
    seller.join()
    print(f"oversold: {oversold[False]} of {options.unfenced} without fencing, ", end="")
    print(f"{oversold[True]} of {options.runs} with it")
    assert oversold[True] == 0


if __name__ == "__main__":
    main()
