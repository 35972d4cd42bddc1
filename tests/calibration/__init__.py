"""Calibration: what the package's statements do on heads that know nothing."""
