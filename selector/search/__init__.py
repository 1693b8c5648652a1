"""From logits to nodes in order of reach: one pass over each row, a compiled best-first search, its readable twin."""
