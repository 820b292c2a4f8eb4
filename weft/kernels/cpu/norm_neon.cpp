#include "weft/kernels/cpu/norm_vec.h"
