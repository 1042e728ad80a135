"""Private servers for the tests, one file per store: free loopback ports, temporary folders."""
