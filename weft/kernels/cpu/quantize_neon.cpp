#include "weft/kernels/cpu/quantize_vec.h"
