"""The optimizer of a run: Muon for the matrices, AdamW for the rest, stepped together on one schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from perilune.config.model import ModelConfig
from perilune.config.train import OptimConfig
from perilune.errors import CheckpointError
from perilune.optim.groups import Treatment, treatment
from perilune.optim.muon import Muon


class Optimizer:
    """Muon and AdamW over the named parameters of one model.

    Args:
        named: (name, parameter) pairs; every parameter is moved by exactly one of the two.
        model: sizes from which the cuts along heads follow.
        optim: rates, momenta and decay.
        muon_dtype: dtype of the Newton–Schulz products; None lets the op choose.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        model: ModelConfig,
        optim: OptimConfig,
        *,
        muon_dtype: torch.dtype | None = None,
    ) -> None:
        self.optim = optim
        self.params = {name: p for name, p in named if p.requires_grad}
        self.treatments: dict[str, Treatment] = {
            name: treatment(name, tuple(p.shape), model, optim.name) for name, p in self.params.items()
        }
        to_muon = {n: p for n, p in self.params.items() if self.treatments[n].rule == "muon"}
        cuts = {n: self.treatments[n].cuts for n in to_muon}
        device = next((p.device for p in self.params.values()), torch.device("cpu"))
        # On a CUDA device the rates lie there, so that a recorded step reads those of the day.
        self._rates_on_device = torch.zeros(2, device=device) if device.type == "cuda" else None
        self._rates: tuple[float | Tensor, float | Tensor] = (optim.lr_muon, optim.lr_adamw)
        if self._rates_on_device is not None:
            self._rates = (self._rates_on_device[0], self._rates_on_device[1])
        self.muon = Muon(to_muon, cuts, momentum=optim.momentum, weight_decay=optim.weight_decay, dtype=muon_dtype)
        self.adamw = self._adamw()

    def _adamw(self) -> torch.optim.AdamW | None:
        groups = []
        for decay in (True, False):
            members = [
                p
                for n, p in self.params.items()
                if self.treatments[n].rule == "adamw" and self.treatments[n].decay is decay
            ]
            if members:
                groups.append({"params": members, "weight_decay": self.optim.weight_decay if decay else 0.0})
        if not groups:
            return None
        betas, on_device = (self.optim.beta1, self.optim.beta2), self._rates_on_device is not None
        return torch.optim.AdamW(
            groups, lr=self._rates[1], betas=betas, eps=self.optim.eps, fused=True, capturable=on_device
        )

    def rates(self, factor: float) -> tuple[float, float]:
        """Learning rates (Muon, AdamW) at the schedule's `factor`."""
        return self.optim.lr_muon * factor, self.optim.lr_adamw * factor

    def step(self, factor: float, scale: Tensor | None = None) -> None:
        """Update all parameters from their gradients (a missing one counts as zero).

        Args:
            factor: of the schedule, on the peak learning rates.
            scale: `[]` on the gradients, for parameters on a GPU; None = 1.
        """
        self.set_rates(factor)
        self.prepare()
        self.apply(scale)

    def prepare(self) -> object:
        """What has to come before `apply`; for one that is recorded, keep the result as long as the recording."""
        return self.muon.prepare()

    def set_rates(self, factor: float) -> None:
        """Take the learning rates at the schedule's `factor`, without waiting for the device."""
        rates = self.rates(factor)
        if self._rates_on_device is None:
            self._rates = rates
            for group in self.adamw.param_groups if self.adamw is not None else ():
                group["lr"] = rates[1]
        else:
            for place, rate in zip(self._rates, rates, strict=True):
                cast(Tensor, place).fill_(rate)

    def apply(self, scale: Tensor | None = None) -> None:
        """Update all parameters at the rates that were set last; on a CUDA device nothing waits for the host."""
        self.muon.step(self._rates[0], scale)
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                for param in group["params"]:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                if scale is not None:
                    torch._foreach_mul_([param.grad for param in group["params"]], scale)
            self.adamw.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for param in self.params.values():
            param.grad = None

    # -- state for checkpoints --------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name: `muon.momentum.*`, `adamw.{step,exp_avg,exp_avg_sq}.*`."""
        state = {f"muon.momentum.{name}": m for name, m in self.muon.momentum.items()}
        if self.adamw is not None:
            for name, param in self.params.items():
                for key, value in self.adamw.state.get(param, {}).items():
                    state[f"adamw.{key}.{name}"] = value
        return state

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Take over a state from `state_tensors`.

        Raises:
            CheckpointError: it belongs to other parameters or another optimizer; the message lists what differs.
        """
        wanted = {f"muon.momentum.{name}": m for name, m in self.muon.momentum.items()}
        adamw = {n: p for n, p in self.params.items() if self.treatments[n].rule == "adamw"}
        stepped = any(key.startswith("adamw.") for key in state)
        if stepped:
            for name, param in adamw.items():
                wanted[f"adamw.exp_avg.{name}"] = wanted[f"adamw.exp_avg_sq.{name}"] = param
                wanted[f"adamw.step.{name}"] = torch.zeros(())
        wrong = [f"{n} is missing" for n in sorted(set(wanted) - set(state))]
        wrong += [f"{n} is unknown" for n in sorted(set(state) - set(wanted))]
        wrong += [
            f"{n} has shape {list(state[n].shape)} instead of {list(w.shape)}"
            for n, w in wanted.items()
            if n in state and state[n].shape != w.shape
        ]
        if wrong:
            shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise CheckpointError(f"the optimizer state does not fit this run ({self.optim.name}): {shown}")
        with torch.no_grad():
            for name, momentum in self.muon.momentum.items():
                momentum.copy_(state[f"muon.momentum.{name}"])
        if self.adamw is not None and stepped:
            for name, param in adamw.items():
                self.adamw.state[param] = {
                    "step": state[f"adamw.step.{name}"].to(param.device, copy=True),
                    "exp_avg": state[f"adamw.exp_avg.{name}"].to(param.device, copy=True),
                    "exp_avg_sq": state[f"adamw.exp_avg_sq.{name}"].to(param.device, copy=True),
                }


def muon_dtype_for(device: torch.device, compute: torch.dtype) -> torch.dtype | None:
    """dtype of the Newton–Schulz products: bf16 on a GPU whose activations are bf16, otherwise the op's own choice (fp32)."""
    return torch.bfloat16 if device.type == "cuda" and compute == torch.bfloat16 else None
