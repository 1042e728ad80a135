"""What the SQL stores share: connections, pools, sessions that hold locks."""
