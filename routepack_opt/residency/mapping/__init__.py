"""Which replica serves each token group."""
