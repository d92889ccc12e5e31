"""Submodules whose activations are computed again in the backward pass: the same gradient with less memory."""
