"""The slow loop around a policy: start layout, what it sees, legal edits, look-ahead, one window after another."""
