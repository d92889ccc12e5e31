"""Estimate the limit of a device that is not here."""
