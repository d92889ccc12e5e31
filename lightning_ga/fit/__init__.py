"""One fit: to read it, begin with ``fit``, ``window_base`` and ``rewind``; ``exactness`` is the measurement."""
