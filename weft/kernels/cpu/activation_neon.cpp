#include "weft/kernels/cpu/activation_vec.h"
