"""One file a subcommand: reads options, calls the planner or the profiler, shows what comes back."""
