"""Lightning's and DDP's private parts, one file a part; lines are those of 2.6.6.

Of most of them ``tests/compat`` tests that they exist; what they do is tested where they are used.
"""
