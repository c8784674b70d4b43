"""Of every Python that the tests start: its imports and its end take a second less, since collections hardly look through what was imported."""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)
