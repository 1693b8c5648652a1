"""Decode with draft trees: target, cache, drafters, the live loop, tracing, training and benchmarking."""
