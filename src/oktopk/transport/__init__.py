"""How bytes move between ranks."""

from oktopk.transport.base import Transport
from oktopk.transport.metered import MeteredTransport
from oktopk.transport.threads import ThreadTransport, ThreadWorld, run_world
from oktopk.transport.torch_dist import TorchTransport

__all__ = ["MeteredTransport", "ThreadTransport", "ThreadWorld", "TorchTransport", "Transport", "run_world"]
