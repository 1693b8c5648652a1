"""Training a DFlash drafter for any small target, on the target's own text."""
