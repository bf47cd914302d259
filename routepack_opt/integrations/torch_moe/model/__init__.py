"""The trained model: a decoder with routed experts over packed rows."""
