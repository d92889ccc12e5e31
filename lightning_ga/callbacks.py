"""Callbacks beside ``AutoAccumulate``: the public path of ``noise_scale``.

Tested in tests/integration/test_noise_scale.py.
"""

from lightning_ga.noise_scale import NoiseScale as NoiseScale
