#define PACELINE_KERNEL_NAMESPACE baseline
#include "shm/kernels/kernels_body.inc"
