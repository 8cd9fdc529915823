"""Colours shared by the page and the images: legible on light and on dark paper, distinct to colour-blind readers."""

from __future__ import annotations

# In order of use. Mid-tone hues that keep a contrast above 3:1 on both backgrounds.
SERIES = ("#5b6ee1", "#e07b39", "#1f9e89", "#c2479b", "#b08a1e", "#4a90c4", "#8c6bb1", "#7a8450")

# Kinds of things in a map: nothing, then pairs of a pale and a strong colour.
KINDS = ("#eef0f5", "#b9c2f2", "#4c5fd6", "#f4c7a1", "#cf6418", "#a5d8cf", "#17806f")

# Anchor colours of the scales, low to high. A diverging scale's middle is the paper.
SEQUENTIAL = {
    "light": ("#f3f4fb", "#c5cdf3", "#8d9ae8", "#5b6ee1", "#38449e", "#1d2459"),
    "dark": ("#1a1e2e", "#2c3563", "#46539f", "#6b7dee", "#a5b1f7", "#e6e9fe"),
}
DIVERGING = {
    "light": ("#1f6f8b", "#7fb7c9", "#f6f6f4", "#f0ad78", "#c2561a"),
    "dark": ("#5cc0dd", "#2f6577", "#20242f", "#96552b", "#f39a56"),
}
