"""The answers of the command line over HTTP: application, guard, calls, jobs and their workers."""
