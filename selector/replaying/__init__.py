"""Policies played over traces without running a model: anchors searched once, rounds, rates, gains and ceilings."""
