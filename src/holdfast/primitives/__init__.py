"""lock, rwlock, semaphore, multi, election, once, every: they build claims and know no store."""
