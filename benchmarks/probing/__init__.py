"""What ``benchmarks.probe`` and ``benchmarks.gpu`` share: models, devices, programs, cells and their tables."""
