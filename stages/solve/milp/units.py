"""Milliseconds and megabytes (10^6 bytes), which keep the model's coefficients near one."""

NS_PER_MS = 1e6
BYTES_PER_MB = 1e6
