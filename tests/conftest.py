"""What holds for every test."""

import signal

# A shell that runs the tests in the background lets them ignore Ctrl-C, and every process they start inherits that:
# those that are to be interrupted would go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
