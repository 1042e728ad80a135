"""lock, rwlock, semaphore, multi, election, once: they build claims and know no store."""
