"""The decorator of all annealing kernels."""

from __future__ import annotations

from numba import njit

# Cached on disk, and run without the GIL so that chains share a process. No reference counting: the kernels allocate
# nothing, and counting every array of a state at every call made them eight times slower. Division like numpy:
# without the zero check loops run in vector lanes.
kernel = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)
