"""What holds for every test."""

import os
import signal

# A shell that runs the tests in the background lets them ignore Ctrl-C, and every process they start inherits that:
# those that are to be interrupted would go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton's kernels run as numpy, on the CPU: whether they are right needs no card. It looks when they are imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
