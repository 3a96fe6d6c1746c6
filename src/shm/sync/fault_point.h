#pragma once

namespace paceline::shm {

// Stands before each store into shared memory that another rank may be waiting for: where a rank
// can be lost with the most harm. Only tests/fault's own build of this layer makes it do anything.
#ifdef PACELINE_FAULT_POINTS
void fault_point();
#else
inline void fault_point() {}
#endif

}  // namespace paceline::shm
