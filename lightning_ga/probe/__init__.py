"""Find the limit: search, prediction from traces, trial steps, cache."""
