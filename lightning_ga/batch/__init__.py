"""One batch of any structure: where its samples lie, how it is cut, how outputs are merged, how items are counted."""
