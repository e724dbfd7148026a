"""Thread settings for every test process, before anything imports torch.

Idle threads must sleep, not spin: some tests use two threads in each of two processes on two cores,
and spinning made them more than ten times slower.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
