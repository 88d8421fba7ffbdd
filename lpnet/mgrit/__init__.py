"""Multigrid reduction in time over the layers: hierarchy, cycle, solver, LayerParallel."""
