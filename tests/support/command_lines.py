"""What tests of the command line type."""

TINY = ("model=mlp", "model.hidden=[32]", "debug=default", "accumulate.micro_batch_size=16", "accumulate.verify=false")
"""A training of one epoch and a few batches; tests that read what the check of exactness says switch it on."""
