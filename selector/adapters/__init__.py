"""Trees in the data layouts of other decoders, one module per engine: each has `from_tree` and `to_tree`."""
