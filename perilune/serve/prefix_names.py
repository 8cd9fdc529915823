"""Under which names what a model computes is cached: by its weights, its arithmetic, and who may share it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from perilune.model import Transformer
from perilune.serve.answer import Answer
from perilune.serve.cache import KnownPrompts, RootKey, TokenChain
from perilune.serve.images import PlacedImage
from perilune.serve.job import LocalJob
from perilune.serve.request import Service


class PrefixNames:
    """Names of the prefixes of one model.

    Args:
        model: its weights may change: `weights_changed`.
        name: of the model.
        unit: tokens between two names.
        lasting: whether other processes may find what is cached: the names then tell the weights themselves.
        shared: whether requests share prefixes at all.

    Attributes:
        weights_number: how often the weights were changed.
    """

    def __init__(self, model: Transformer, name: str, unit: int, *, lasting: bool, shared: bool) -> None:
        self._model, self._name, self._unit, self._lasting, self._shared = model, name, unit, lasting, shared
        self._known = KnownPrompts()
        self.weights_number = 0
        self._identity = self._identified()

    def weights_changed(self) -> None:
        """The model has other weights: what was computed by the old ones is not found any more."""
        self._identity = self._identified()
        self.weights_number += 1

    def _identified(self) -> str:
        # Every process counts changes of weights from 0, so that the number says nothing to another one.
        return f"{self._name} {fingerprint(self._model)}" if self._lasting else self._name

    def root_key(self, salt: str = "") -> RootKey:
        """What a cached state depends on besides tokens and images."""
        numerics = f"{self._model.compute_dtype} {self._model.device.type}"
        return RootKey(model=self._identity, weights=self.weights_number, numerics=numerics, salt=salt)

    def chain(
        self, name: str, answer: Answer, ids: Sequence[int], images: Sequence[PlacedImage], service: Service
    ) -> TokenChain:
        """Names of an answer's prefixes.

        Args:
            name: of its sequence, which nobody else has.
            answer: what is to be computed.
            ids: its prompt.
            images: in the prompt.
            service: with the salt that whoever shares the prefixes has, too.
        """
        root = self._root(name, self._alone(answer), service)
        return self._known.chain(root, self._unit, ids, [image.key for image in images])

    def rename(self, job: LocalJob) -> None:
        """Let a job that was made for earlier weights be cached under the name of those that compute it."""
        job.weights = self.weights_number
        for sequence in job.sequences:
            answer = sequence.content
            # Rows of its images are what the earlier weights saw: they serve this job, and nobody else.
            root = self._root(sequence.name, bool(answer.images) or self._alone(answer), job.service)
            keys = [image.key for image in answer.images]
            sequence.chain = TokenChain(root, self._unit, sequence.ids, keys)

    def _alone(self, answer: Answer) -> bool:
        """Whether an answer shares no prefix: scores of every token of a prompt need every token of it."""
        return not self._shared or answer.wants_prompt_scores

    def _root(self, name: str, alone: bool, service: Service) -> RootKey:
        return self.root_key(f"{name} alone" if alone else service.cache_salt)


def fingerprint(model: Transformer) -> str:
    """A name that the model's weights decide: a hash of all their bytes."""
    hasher = hashlib.sha256()
    for key, tensor in model.state_dict().items():
        hasher.update(f"{key} {tensor.dtype} {list(tensor.shape)} ".encode())
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
