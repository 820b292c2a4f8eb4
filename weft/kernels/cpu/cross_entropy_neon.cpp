#include "weft/kernels/cpu/cross_entropy_vec.h"
