"""The ZooKeeper client: our own packets, sending and reading, around kazoo's session."""
