"""Several servers that work as one: started together, waited for together."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, Self, TypeVar

from servers.process import Server, wait_until

Node = TypeVar("Node", bound=Server)


class Ensemble(Generic[Node]):
    """Nodes of one store. The methods act on all of them; for one, take it from `nodes`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)

    @property
    def hosts(self) -> str:
        """`host:port` of every node, as URLs list them."""
        return ",".join(f"{node.host}:{node.port}" for node in self.nodes)

    @property
    def alive(self) -> bool:
        return all(node.alive for node in self.nodes)

    def start(self) -> Self:
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> None:
        # Together: a quorum must be there before any of them answers.
        for node in self.nodes:
            if not node.alive:
                node.launch()

    def wait_ready(self) -> None:
        for node in self.nodes:
            node.wait_ready()

    def pause(self) -> None:
        for node in self.nodes:
            node.pause()

    def resume(self) -> None:
        for node in self.nodes:
            node.resume()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def wipe(self) -> None:
        """Loses all data of all nodes; what runs comes back empty."""
        runs = self.alive
        self.kill()
        for node in self.nodes:
            node.wipe()
        if runs:
            self.start()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()


class Trio(Ensemble[Node]):
    """Servers that elect one of them."""

    suffix = ""
    """What a URL of theirs ends with."""

    def leads(self, node: Node) -> bool | None:
        """Whether this one leads, by its own word; None where nobody does."""
        raise NotImplementedError

    def term_of(self, node: Node) -> int:
        """The number of the last election, as far as this one knows."""
        raise NotImplementedError

    def term(self, without: Server | None = None) -> int:
        """The same, by the word of all that run (but for one, who may be cut off); 0 if none of
        them says anything."""
        terms = [0]
        for node in self.nodes:
            with suppress(OSError):
                if node.alive and not node.paused and node is not without:
                    terms.append(self.term_of(node))
        return max(terms)

    @property
    def url(self) -> str:
        return self.url_of(*self.nodes)

    def url_of(self, *nodes: Node) -> str:
        """The URL of some of them."""
        hosts = ",".join(f"{node.host}:{node.port}" for node in nodes)
        return f"{nodes[0].name}://{hosts}{self.suffix}"

    def others(self, lonely: Node) -> str:
        """The URL of all but one."""
        return self.url_of(*(node for node in self.nodes if node is not lonely))

    def leader(self) -> Node:
        """The one that leads now, waited for during an election."""
        return self._find(leads=True)

    def follower(self) -> Node:
        """One that does not."""
        return self._find(leads=False)

    def wait_settled(self) -> None:
        """Returns when one leads and all others follow, each by its own word."""

        def settled() -> bool:
            words = [self.leads(node) for node in self.nodes]
            return words.count(True) == 1 and words.count(False) == len(words) - 1

        wait_until("one leader", settled)

    def _find(self, *, leads: bool) -> Node:
        found: list[Node] = []

        def look() -> bool:
            for node in self.nodes:
                with suppress(OSError):
                    if node.alive and not node.paused and self.leads(node) is leads:
                        found.append(node)
            return bool(found)

        wait_until("a leader" if leads else "a follower", look)
        return found[0]
