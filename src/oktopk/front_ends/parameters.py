"""What parameters are called, and which of them cannot be reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from oktopk.errors import UnsupportedError

Named = tuple[str, nn.Parameter]
COMPILED = "_orig_mod."  # what torch.compile puts in front of a module's names


def named_parameters(module: nn.Module, ignored: Iterable[str] = ()) -> list[Named]:
    """Parameters with names that are the same with and without `torch.compile`. Shared parameters come once."""
    ignored = set(ignored)
    return [(name.replace(COMPILED, ""), p) for name, p in module.named_parameters() if name not in ignored]


def refuse_unsupported(parameters: Iterable[Named], module: nn.Module | None, in_one_vector: bool) -> None:
    """Refuse parameters whose gradients no reducer can serve, or not as one vector."""
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    _refuse_sparse(trained, module)
    _refuse_complex(trained)
    devices = sorted({str(parameter.device) for _, parameter in trained})
    if in_one_vector and len(devices) > 1:
        raise UnsupportedError(
            f"the parameters are on {len(devices)} devices ({', '.join(devices)}), and fuse='step' makes one vector of "
            "their gradients, as norm_clip of oktopk.register does: use fuse='bucket', and "
            "oktopk.DistributedOptimizer to clip."
        )


def sparse_gradient(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"the gradient of {name!r} is a sparse tensor, which cannot be reduced. Make the layer with sparse=False: its "
        "gradient is then a dense tensor of mostly zeros, which are not sent."
    )


def _refuse_sparse(trained: Sequence[Named], module: nn.Module | None) -> None:
    names = {id(parameter): name for name, parameter in trained}
    for layer in module.modules() if module is not None else ():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and id(layer.weight) in names:
            raise sparse_gradient(names[id(layer.weight)])


def _refuse_complex(trained: Sequence[Named]) -> None:
    for name, parameter in trained:
        if parameter.is_complex():
            raise UnsupportedError(
                f"parameter {name!r} is {parameter.dtype}, and complex gradients cannot be reduced. Make it real, with "
                "a last dimension of 2 for real and imaginary part, and use torch.view_as_complex in forward."
            )
