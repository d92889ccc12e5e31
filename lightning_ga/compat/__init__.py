"""Lightning's and DDP's private parts, one file a part, which ``tests/compat`` tests; lines are those of 2.6.6."""
