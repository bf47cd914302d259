"""Models x phases x policies on equal terms, beside the paper."""
