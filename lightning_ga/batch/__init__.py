"""One batch of any structure: where its samples lie, how many they are, and how it is cut."""
