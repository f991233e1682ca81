"""Compressed averages of buckets: state, residuals and exchange, for hooks and for `local_sgd`."""
