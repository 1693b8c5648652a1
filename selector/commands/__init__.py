"""One file per command of `selector`."""
