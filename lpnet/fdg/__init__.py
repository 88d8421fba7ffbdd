"""Decoupled training: the network is cut into modules that train at the same time with delayed gradients."""
