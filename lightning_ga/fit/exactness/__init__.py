"""The check of exactness: passes over a batch and over its parts, their gradients compared, and what training shows."""
