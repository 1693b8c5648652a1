"""What `selector.tune` is made of: candidates, parts of a trace, cross-fitting, the choice."""
