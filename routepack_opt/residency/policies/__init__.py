"""Residency policies, one a file; all see the same after every window (``observation.PolicyView``)."""
