#include "weft/kernels/cpu/rows_vec.h"
