// Activations of gated units. Exponents are bounded so that no product overflows; NaN stays NaN.
#pragma once
#include "device.h"

constexpr float LOG2E = 1.4426950408889634f;

DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-LOG2E * x)); }
DEVICE float at_least(float x, float least) { return x < least ? least : x; }
DEVICE float at_most(float x, float most) { return x > most ? most : x; }

// beta tanh(a / beta) sigmoid(a) linear_beta tanh(b / linear_beta); a sigmoid(a) b without the caps.
template <bool GATE_CAP, bool UP_CAP> DEVICE float gated_unit(float a, float b, float beta, float linear_beta) {
    const float opened = reciprocal(1.0f + exp2_fast(at_least(a, -56.0f) * -LOG2E));
    float left = a, right = b;
    if (GATE_CAP) {
        const float u = exp2_fast(at_most(a * (-2.0f * LOG2E / beta), 40.0f));
        left = beta * (1.0f - u) * reciprocal(1.0f + u);
    }
    if (UP_CAP) {
        const float v = exp2_fast(at_most(b * (-2.0f * LOG2E / linear_beta), 40.0f));
        right = linear_beta * (1.0f - v) * reciprocal(1.0f + v);
    }
    return left * opened * right;
}
