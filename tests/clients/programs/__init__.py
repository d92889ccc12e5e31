"""One file a client, called like its package; each lists its ``PROGRAMS``, written as its own quick-start is."""
