"""An LSTM layer over utterances laid side by side without padding, fast on a processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

tanh_backward, sigmoid_backward = torch.ops.aten.tanh_backward, torch.ops.aten.sigmoid_backward
_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class FrameLSTM(nn.LSTM):
    """One unidirectional layer of `nn.LSTM` over a `PackedSequence`; the same parameters, the same mathematics.

    Padding costs nothing, and under autocast products are bfloat16, which oneDNN's own LSTM does not train in. The
    product with the state has only as many rows as there are utterances: weights are laid out for it once per pass.
    """

    def forward(self, x: PackedSequence) -> PackedSequence:  # type: ignore[override]
        narrow = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        if not _is_served(x.data, narrow):
            return super().forward(x)[0]
        w_ih, w_hh, b_ih, b_hh = (self.get_parameter(f"{name}_l0") for name in _NAMES)
        out: Tensor = _Recurrence.apply(x.data.float(), w_ih, w_hh, b_ih + b_hh, x.batch_sizes.tolist(), narrow)
        return PackedSequence(out, x.batch_sizes, x.sorted_indices, x.unsorted_indices)


class _Recurrence(torch.autograd.Function):
    """States of all frames; rows are frames, those of one time together, and fewer as utterances end.

    Products are of numbers rounded to `narrow`, as under autocast; states and gates are float32 throughout.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor, sizes: Sequence[int], narrow: torch.dtype
    ) -> Tensor:
        x = x.to(narrow)
        gates = F.linear(x, w_ih.to(narrow), bias.to(narrow)).float()
        out, cells = _states(gates, w_hh.to(narrow), sizes)
        # The weights as they are: narrow ones would be a second copy of the network, kept until backward.
        ctx.save_for_backward(x, w_ih, w_hh, gates, cells, out)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w_ih, w_hh, gates, cells, out = ctx.saved_tensors
        d_gates = _gate_gradients(grad, gates, cells, w_hh.to(x.dtype), ctx.sizes)
        d_bias, d_gates = d_gates.sum(0), d_gates.to(x.dtype)
        d_x = (d_gates @ w_ih.to(x.dtype)).float() if ctx.needs_input_grad[0] else None
        h_before = _before(out, ctx.sizes).to(x.dtype)
        d_w_hh = d_gates[ctx.sizes[0] :].t() @ h_before  # the first rows start from a state of zero
        return d_x, (d_gates.t() @ x).float(), d_w_hh.float(), d_bias, None, None


def _states(gates: Tensor, w_hh: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Outputs and cells of all frames; `gates` holds what the inputs add to them, and then their values."""
    hidden = w_hh.shape[1]
    recur = _Product(w_hh, sizes[0])
    out, cells = (gates.new_empty(len(gates), hidden) for _ in range(2))
    h = c = gates.new_zeros(sizes[0], hidden)
    for now, h_out, c_out in zip(*(rows.split(sizes) for rows in (gates, out, cells)), strict=True):
        now += recur(h[: len(now)])
        i, f, g, o = now.split(hidden, dim=1)
        for gate in (now[:, : 2 * hidden], o):
            gate.sigmoid_()
        torch.addcmul(i * g.tanh_(), f, c[: len(now)], out=c_out)
        torch.mul(o, torch.tanh(c_out), out=h_out)
        h, c = h_out, c_out
    return out, cells


def _gate_gradients(grad: Tensor, gates: Tensor, cells: Tensor, w_hh: Tensor, sizes: Sequence[int]) -> Tensor:
    hidden = w_hh.shape[1]
    recur = _Product(w_hh.t().contiguous(), sizes[0])
    d_gates = torch.empty_like(gates)
    dh = dc = grad.new_zeros(0, hidden)
    zeros = grad.new_zeros(sizes[0], hidden)
    steps = list(zip(*(rows.split(sizes) for rows in (gates, cells, grad, d_gates)), strict=True))
    for t in reversed(range(len(steps))):
        now, cell, from_above, d_now = steps[t]
        cell_before = steps[t - 1][1][: len(now)] if t else zeros
        i, f, g, o = now.split(hidden, dim=1)
        di, df, dg, do = d_now.split(hidden, dim=1)
        dh, dc = (F.pad(d, (0, 0, 0, len(now) - len(d))) if len(now) > len(d) else d for d in (dh, dc))
        dh = dh + from_above
        squashed = torch.tanh(cell)
        dc = dc + tanh_backward(dh * o, squashed)
        sigmoid_backward(dh * squashed, o, grad_input=do)
        sigmoid_backward(dc * g, i, grad_input=di)
        sigmoid_backward(dc * cell_before, f, grad_input=df)
        tanh_backward(dc * i, g, grad_input=dg)
        dc = dc * f
        dh = recur(d_now)
    return d_gates


def _before(out: Tensor, sizes: Sequence[int]) -> Tensor:
    """The state that each frame started from, without those of zero."""
    return torch.cat([h[:rows] for h, rows in zip(out.split(sizes)[:-1], sizes[1:], strict=True)])


class _Product:
    """rows @ weight.T, the weight laid out for oneDNN."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows.to(self._weight.dtype)
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, None, "none", [], "")  # type: ignore[no-any-return]


def _is_served(x: Tensor, narrow: torch.dtype) -> bool:
    """Whether oneDNN makes such products here; bfloat16 needs a processor that has it."""
    if x.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return narrow == torch.float32 or (narrow == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
