"""Nodes on one machine: network namespaces, rates of their links, and the lifetime of ranks."""
