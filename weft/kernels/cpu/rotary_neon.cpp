#include "weft/kernels/cpu/rotary_vec.h"
