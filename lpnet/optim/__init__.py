"""Optimisers on distributed parameters: L-BFGS, torch.optim, clipping, regularisation."""
