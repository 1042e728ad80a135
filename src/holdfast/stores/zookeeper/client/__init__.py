"""The ZooKeeper client: packets, the greeting, a connection that is shared, heartbeats."""
