"""Several servers that work as one: started together, waited for together."""

from collections.abc import Sequence
from typing import Generic, Self, TypeVar

from servers.process import Server

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
