"""Lightning's and DDP's private parts, one file a part; ``tests/compat`` fails when one changes.

Read in lightning 2.6.6 and 2.5.0; line numbers are those of 2.6.6.
"""
