"""One thread a process, for what a test starts too: two workers on two cores would wait for each
other's threads. Set before torch is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
