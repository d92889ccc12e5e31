"""One fit: to read it, begin with ``fit``, ``windows`` and ``rewind``; ``exactness`` is the measurement."""
