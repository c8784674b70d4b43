"""For every Python that the tests start: collections do not search what was imported, which saves 0.6 s of each import of PyTorch and its end."""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)
