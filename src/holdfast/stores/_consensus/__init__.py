"""What the stores on consensus (etcd, Consul, ZooKeeper) share: sessions, strict reading."""
