"""What the stores on consensus (etcd, Consul, ZooKeeper) share: hosts, sessions, strict reading."""
