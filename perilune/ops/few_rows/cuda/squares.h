// The start of sums of squares that two kernels add in one order, so that their bits agree.
#pragma once
#include "device.h"

DEVICE float four_squares(float a, float b, float c, float d) { return fmaf(d, d, fmaf(c, c, fmaf(b, b, a * a))); }
