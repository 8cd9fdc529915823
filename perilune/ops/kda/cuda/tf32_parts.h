// A float as two tf32, so that three products give what one of floats would.
#pragma once
#include "device.h"

// The upper 11 bits of a float (`mask`: TF32_BITS), as a tf32; what is left has 13 more, of which a product takes 11. The mask
// shall be a number that the compiler does not know, or it would see that a product does not read what is masked, take the float
// itself, and move it into place anew for every product.
constexpr u32 TF32_BITS = 0xffffe000u;
DEVICE u32 high_part(float x, u32 mask) { return bits(x) & mask; }
// The same, to the nearest.
DEVICE u32 nearest_part(float x, u32 mask) { return (bits(x) + 0x1000u) & mask; }
DEVICE u32 low_part(float x, u32 high) { return bits(x - from_bits(high)); }
