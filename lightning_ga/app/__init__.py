"""The command line: compose, build, run, report."""
