#define PACELINE_KERNEL_NAMESPACE avx2
#include "shm/kernels/kernels_body.inc"
