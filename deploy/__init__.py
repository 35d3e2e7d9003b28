"""The command line, jobs and configurations that put truespec to work."""
