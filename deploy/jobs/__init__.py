"""Long-running work, started from the command line or with `ray job submit`."""
