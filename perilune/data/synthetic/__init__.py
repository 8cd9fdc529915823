"""Synthetic tasks by name."""

from perilune.data.synthetic.arithmetic import Arithmetic
from perilune.data.synthetic.copying import Copy, Palindrome
from perilune.data.synthetic.needle import Needle, hide_in_text
from perilune.data.synthetic.recall import Recall
from perilune.data.synthetic.state_tracking import StateTracking
from perilune.data.synthetic.task import Example, Task
from perilune.data.synthetic.whole_window import WholeWindow

TASKS: dict[str, type] = {
    "recall": Recall,
    "needle": Needle,
    "copy": Copy,
    "palindrome": Palindrome,
    "state": StateTracking,
    "arithmetic": Arithmetic,
    "whole_window": WholeWindow,
}
"""Name in `data.synthetic` -> class; all build with their defaults."""

__all__ = [
    "TASKS", "Arithmetic", "Copy", "Example", "Needle", "Palindrome", "Recall", "StateTracking", "Task", "WholeWindow",
    "hide_in_text",
]  # fmt: skip
