// Gates of KDA at one token. Macro: BOUNDED, the decay's gate has a lower bound.
#pragma once
#include "device.h"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-LOG2E * x)); }

// The log-decay's exponential of one channel.
DEVICE float decay(float z, float rate, float lower_bound) {
    if (BOUNDED) return exp2_fast(LOG2E * lower_bound * sigmoid(rate * z));
    const float softplus = fmaxf(z, 0.0f) + LN2 * log2_fast(1.0f + exp2_fast(-LOG2E * fabsf(z)));
    return z == z ? exp2_fast(-LOG2E * rate * softplus) : z;  // fmaxf drops a NaN
}
