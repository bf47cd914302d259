"""Step time of a plan: from measured kernels (replay), from a fitted model (simulate), and the fit (calibrate)."""
