"""One fit: to read it, begin with ``fit``, ``engine``, ``window`` and ``window_run``; ``exactness`` is the check."""
