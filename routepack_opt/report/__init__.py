"""What a plan gains, in words and figures."""
