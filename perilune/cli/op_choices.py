"""Ask every operation which implementation it would run, on small sample inputs.

An operation with more than one implementation has a `select(...)`. They are found by looking through `perilune.ops`, and
their arguments are made from the parameter names, whose last letters are the project's shape legend: `logits_NE` is a
tensor of shape [tokens, experts].
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

_SIZES = {"B": 2, "T": 32, "S": 32, "D": 64, "L": 32, "H": 2, "K": 64, "V": 64, "N": 64, "E": 8, "A": 2, "F": 32, "X": 128, "W": 4, "Z": 256, "n": 32, "r": 16, "I": 64, "O": 32, "M": 32, "P": 64, "C": 48, "w": 576}  # fmt: skip
_DTYPES = ("fp32", "bf16")


def selects() -> dict[str, Callable[..., Any]]:
    """Every `select` of `perilune.ops`, by the name of the operation, e.g. "moe.router"."""
    import perilune.ops

    found = {}
    for module in pkgutil.walk_packages(perilune.ops.__path__, "perilune.ops."):
        try:
            select = getattr(importlib.import_module(module.name), "select", None)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # GPU kernels need an extra that this machine may lack
                raise
            continue
        if inspect.isfunction(select):
            found.setdefault(select.__module__, select)
    names = {module: module.removeprefix("perilune.ops.").removesuffix(".api") for module in found}
    return {names[module]: found[module] for module in sorted(found)}


def op_choices() -> list[dict[str, str]]:
    """Rows {op, device, dtype, implementation, reason} for every operation, activation type and usable device."""
    import torch

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = []
    for name, select in selects().items():
        for device in devices:
            for dtype in _DTYPES:
                implementation, reason = _ask(select, device, dtype)
                rows.append(
                    {"op": name, "device": device, "dtype": dtype, "implementation": implementation, "reason": reason}
                )
    return rows


def _ask(select: Callable[..., Any], device: str, dtype: str) -> tuple[str, str]:
    arguments: list[Any] = []
    keywords: dict[str, Any] = {}
    for parameter in inspect.signature(select).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD or (
            parameter.kind is parameter.VAR_POSITIONAL and "dtype" not in parameter.annotation
        ):
            continue
        try:
            value = _sample(parameter, device, dtype)
        except KeyError as unknown:
            return "unknown", f"doctor has no sample for the argument {parameter} ({unknown})"
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty:
                keywords[parameter.name] = value
        else:
            arguments.append(value)
    choice = select(*arguments, **keywords)
    return choice.implementation, choice.reason


def _sample(parameter: inspect.Parameter, device: str, dtype: str) -> Any:
    """A value for one parameter of a `select`, judged by its annotation (text) and its name."""
    import torch

    activation = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    kind, name = str(parameter.annotation), parameter.name
    if "Tensor" in kind:
        letters = name.rsplit("_", 1)[1] if "_" in name else "BTD"
        letters = letters.rstrip("0123456789")
        shape = [_SIZES[letter] for letter in letters if not letter.isdigit()] if letters else [1]
        # Router logits, scores and states are fp32 by the precision policy, whatever the activations are.
        fixed = any(word in name for word in ("logits", "scores", "state", "bias"))
        tensor = torch.zeros(shape, dtype=torch.float32 if fixed else activation, device=device)
        return [tensor, tensor.clone()] if "Sequence" in kind or "list" in kind or "tuple" in kind else tensor
    if "DeviceWeight" in kind:  # MXFP4 as the kernels want it; on a CPU as it is published
        from perilune.ops.mx.experts import PackedWeight
        from perilune.ops.mx.pack import pack

        packed = PackedWeight.of(torch.zeros(_SIZES["E"], 128, 128, device=device))
        return pack(*packed) if device == "cuda" else packed
    if "torch.dtype" in kind:
        return activation
    if "device" in kind:
        return torch.device(device)
    if kind.startswith("bool"):
        return False
    if kind.startswith("int"):
        return _SIZES.get(name[:1].upper(), 64) if len(name) <= 2 else 64
    if parameter.default is not parameter.empty:
        return parameter.default
    raise KeyError(kind)
