"""Other projects' programs with ``AutoAccumulate``: each trained in one pass and in every mode, and compared."""
