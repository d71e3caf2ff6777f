"""What can be trained: one row per workload, imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from oktopk.errors import ConfigError, UnsupportedError, nearest

# name: (module:configuration class, module:workload class, pip extra that it needs)
WORKLOADS: dict[str, tuple[str, str, str]] = {
    "speech": (
        "oktopk.workloads.speech.workload:SpeechConfig",
        "oktopk.workloads.speech.workload:SpeechWorkload",
        "speech",
    ),
    "vision": (
        "oktopk.workloads.vision.workload:VisionConfig",
        "oktopk.workloads.vision.workload:VisionWorkload",
        "trainer",
    ),
    "bert": (
        "oktopk.workloads.bert.workload:BertConfig",
        "oktopk.workloads.bert.workload:BertWorkload",
        "bert",
    ),
    "gpt": (
        "oktopk.workloads.gpt.workload:GptConfig",
        "oktopk.workloads.gpt.workload:GptWorkload",
        "trainer",
    ),
    "ptb": (
        "oktopk.workloads.ptb.workload:PtbConfig",
        "oktopk.workloads.ptb.workload:PtbWorkload",
        "trainer",
    ),
}


def workload_classes(name: str) -> tuple[type[Any], type[Any]]:
    """Configuration class and workload class of a name in `WORKLOADS`."""
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}. {nearest(name, WORKLOADS)}")
    config, workload, extra = WORKLOADS[name]
    try:
        return _resolve(config), _resolve(workload)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"workload {name!r} needs the module {error.name!r}: pip install 'oktopk[{extra}]'."
        ) from error


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
