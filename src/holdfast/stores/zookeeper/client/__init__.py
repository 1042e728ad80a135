"""The ZooKeeper client: packets and connection of our own, around kazoo's session."""
