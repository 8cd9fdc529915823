"""What happens beside the steps, one behaviour a file."""

from perilune.train.callbacks.callback import Callback
from perilune.train.callbacks.evaluation import Evaluation
from perilune.train.callbacks.interrupt import Interrupt
from perilune.train.callbacks.metrics import Metrics
from perilune.train.callbacks.pictures import Pictures
from perilune.train.callbacks.probe import Probes
from perilune.train.callbacks.sample import Sample
from perilune.train.callbacks.saving import Saving
from perilune.train.callbacks.time_limit import TimeLimit

__all__ = ["Callback", "Evaluation", "Interrupt", "Metrics", "Pictures", "Probes", "Sample", "Saving", "TimeLimit"]
