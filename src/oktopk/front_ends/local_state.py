"""The state of local steps as tensors and plain values: weights, what has arrived, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oktopk.reduction.rank_states import RankStates, total
from oktopk.types import Reduced, SparseVector

_OfRank = Callable[[Mapping[str, Any], Mapping[str, Tensor]], dict[str, Tensor]]  # of its state and the shared weights


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """That of `optimizer.state_dict()`, by position, so that keys are text."""
    state = optimizer.state_dict()
    return {
        "state": {str(index): dict(entry) for index, entry in state["state"].items()},
        "param_groups": [dict(group) for group in state["param_groups"]],
    }


def load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    state = {int(index): dict(entry) for index, entry in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": [_group(group) for group in saved["param_groups"]]})


def _group(saved: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists only, and optimizers compare and unpack tuples."""
    return {
        name: tuple(value) if isinstance(value, list) and name != "params" else value for name, value in saved.items()
    }


def plain(arrived: Reduced | None) -> dict[str, Any]:
    if arrived is None:
        return {}
    return {name: _plain_vector(getattr(arrived, name)) for name in ("mean", "sent")}


def _plain_vector(vector: Tensor | SparseVector | None) -> dict[str, Tensor]:
    if isinstance(vector, SparseVector):
        return {"indices": vector.indices.clone(), "values": vector.values.clone()}
    return {} if vector is None else {"values": vector.clone()}


def reduced_from(saved: Mapping[str, Any], numel: int) -> Reduced | None:
    if not saved:
        return None

    def vector(part: Mapping[str, Tensor]) -> Any:
        if not part:
            return None
        return SparseVector(part["indices"], part["values"], numel) if "indices" in part else part["values"]

    return Reduced(vector(saved["mean"]), vector(saved["sent"]))


def keeping(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved weights of one vector for a rank whose own weights contain what is owed."""
    if not saved.get("forgotten"):
        return saved
    owed = _owed_in_all(saved, saved["shared"])
    return {**saved, "owed": owed, "own": _less(saved["shared"], owed, saved["own"]), "forgotten": {}}


def forgetting(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same for a rank whose own weights forget it."""
    if saved.get("forgotten"):
        return saved
    return {**saved, "forgotten": saved["owed"], "own": dict(saved["shared"]), "owed": {}, "kept": 0.0}


def _owed_in_all(saved: Mapping[str, Any], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What own weights do not contain, and what they have changed since they were the shared ones."""
    return {name: part + _change(shared[name], saved["own"][name]) for name, part in saved["forgotten"].items()}


def _change(shared: Tensor, own: Tensor) -> Tensor:
    """How far own weights are from what they would be if they were the shared ones, to the bits that they have."""
    return (shared.to(own.dtype).to(shared.dtype) - own.to(shared.dtype)).view_as(shared)


def _less(shared: Mapping[str, Tensor], owed: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: (part - owed[name]).to(like[name].dtype) for name, part in shared.items()}


def inherit_same(states: RankStates) -> dict[str, Any]:
    """The state of the same rank of the same world; what its file leaves out, another's has."""
    shared = {"optimizers": states.leading["optimizers"], "still": states.first["still"]}
    return {**states.nearest, **shared, "weights": [_same_weights(part) for part in _vectors(states)]}


def inherit(states: RankStates, over_senders: Collection[int] = ()) -> dict[str, Any]:
    """A rank's state in a world of another size, but for its reducer: owed is shared out, optimizers are averaged.

    Means of some vectors, by number, are over those who sent an entry.
    """
    of_hosts = states.of_leaders().part("optimizers")
    optimizers = [_inherit_optimizer(of_hosts.part(index)) for index in range(len(states.leading["optimizers"]))]
    weights = [_inherit_weights(part, index in over_senders) for index, part in enumerate(_vectors(states))]
    return {**states.first, "weights": weights, "optimizers": optimizers}


def _vectors(states: RankStates) -> list[RankStates]:
    return [states.part("weights").part(index) for index in range(len(states.first["weights"]))]


def _same_weights(states: RankStates) -> dict[str, Any]:
    own = {name: states.nearest.get(name) or states.leading.get(name, {}) for name in ("own", "owed", "forgotten")}
    return {**states.nearest, **own, "shared": states.first["shared"]}


def _inherit_weights(states: RankStates, is_over_senders: bool) -> dict[str, Any]:
    """The weights of one vector on a rank of a world of another size, with nothing under way.

    Own weights are the shared ones less what is owed, or where they forget it, less what they hold of it.
    """
    shared, first = dict(states.first["shared"]), states.first

    def shared_out(of_rank: _OfRank) -> dict[str, Tensor]:
        by_host = [_by_host(ranks, shared, of_rank) for ranks in states.inherited]
        parts = _mean_over_owing(by_host) if is_over_senders else total(by_host, states.scale_of_hosts)
        return {name: parts.get(name, torch.zeros_like(part)) for name, part in shared.items()}

    owed, held = shared_out(_owed_after), shared_out(_held) if first.get("forgotten") else {}
    _pay(shared, first["arrived"].get("mean", {}))
    inherited = {"shared": shared, "arrived": {}}
    if not held:
        return {**inherited, "own": _less(shared, owed, first["own"]), "owed": owed}
    own = _less(shared, held, first["own"])
    forgotten = {name: part - _change(shared[name], own[name]) for name, part in owed.items()}
    return {**inherited, "own": own, "owed": {}, "forgotten": forgotten, "kept": 0.0}


def _mean_over_owing(hosts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What several owed at an entry, as one who sends it for them would have it count: their mean, as theirs would."""
    owing = total(({name: part.ne(0).to(part.dtype) for name, part in host.items()} for host in hosts), 1)
    return {name: part / owing[name].clamp(min=1) for name, part in total(hosts, 1).items()}


def _by_host(ranks: Sequence[Mapping[str, Any]], shared: Mapping[str, Tensor], of_rank: _OfRank) -> dict[str, Tensor]:
    """What a host owes: weights its first rank has for all, and of buffers every rank has its own."""
    told = [of_rank(state, shared) for state in ranks if state["own"]]
    return total(told, 1 / max(1, len(told)))


def _held(state: Mapping[str, Any], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What own weights hold of what a rank owes."""
    return {name: _change(shared[name], own) for name, own in state["own"].items()}


def _owed_after(state: Mapping[str, Any], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a rank owes when what has arrived is applied."""
    owed = _owed_in_all(state, shared) if state.get("forgotten") else dict(state["owed"])
    _pay(owed, state["arrived"].get("sent", {}))
    return owed


def _pay(parts: dict[str, Tensor], amount: Mapping[str, Tensor]) -> None:
    """Subtract a vector, saved as by `plain`, from what it lies over, part by part."""
    if not amount:
        return
    flat = torch.cat([part.flatten() for part in parts.values()])
    if "indices" in amount:
        flat.index_add_(0, amount["indices"].long(), amount["values"], alpha=-1)
    else:
        flat.sub_(amount["values"])
    parts.update(zip(parts, flat.split([part.numel() for part in parts.values()]), strict=True))


def _inherit_optimizer(states: RankStates) -> dict[str, Any]:
    """One optimizer state for a host that inherits several or none: means of tensors, the rest as in the nearest."""
    given: Sequence[Mapping[str, Any]] = [state for host in states.inherited for state in host] or [states.nearest]
    merged = {
        index: {name: _mean([state["state"][index][name] for state in given]) for name in entry}
        for index, entry in given[0]["state"].items()
        if all(index in state["state"] for state in given)
    }
    return {"state": merged, "param_groups": given[0]["param_groups"]}


def _mean(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    return torch.stack([value.double() for value in values]).mean(0).to(values[0].dtype)
