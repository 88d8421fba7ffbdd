"""Files of a run: checkpoints, metrics, log, trace, environment.

Importing this package imports none of its modules; `lpnet show` reads a checkpoint without torch.
"""
