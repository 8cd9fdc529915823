"""`config.json` of the published families, both ways."""

from perilune.config.published.document import PublishedConfig, family, from_json, load_config, to_json
from perilune.config.published.fields import KIMI_K3, KIMI_LINEAR
from perilune.config.published.publishing import canonical, generation_config, publish, without_extra_layers

__all__ = [
    "KIMI_K3",
    "KIMI_LINEAR",
    "PublishedConfig",
    "canonical",
    "family",
    "from_json",
    "generation_config",
    "load_config",
    "publish",
    "to_json",
    "without_extra_layers",
]
